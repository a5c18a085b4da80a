"""What workers of each kind may say."""

import pytest

from protos.generated import scheduler_pb2
from services.core import Completion, FinishReason, Report, RequestProgress
from services.runtime.codecs.attach import encode_report
from services.runtime.errors import InvalidArgument
from services.scheduler.links.border import check_hello, check_report
from services.worker.backend.capacity import Capacity, limits_of
from services.worker.codec import encode_hello
from services.worker.config import WorkerConfig
from services.worker.emulation import serving as emulated
from services.worker.emulation.config import EmulationConfig
from services.worker.requests.types.limits import Limits

CONFIG = WorkerConfig(worker_id="w", address="unix:/w", served_model_name="demo")
NO_EOS: frozenset[int] = frozenset()
KINDS = {
    "own engine": Limits(64, max_context_tokens=512),
    "emulated": emulated.limits_of(CONFIG.model_copy(update={"kv_tokens": 4_096}),
                                   EmulationConfig(), NO_EOS),
    "server that tells nothing": limits_of(CONFIG, Capacity(), NO_EOS),
    "llama.cpp": limits_of(CONFIG, Capacity(4 * 512, 1, 4, 512), NO_EOS),
    "vLLM": limits_of(CONFIG, Capacity(8_192, 16, 0, 4_096), NO_EOS),
}  # fmt: skip


def hello_of(limits: Limits) -> scheduler_pb2.WorkerHello:
    return encode_hello(CONFIG, limits, "here")


@pytest.mark.parametrize("limits", KINDS.values(), ids=KINDS)
def test_worker_of_each_kind_may_report_all_that_it_has(limits: Limits) -> None:
    hello = hello_of(limits)
    check_hello(hello)
    reach = min(limits.reach_tokens, 2**31 - 1)
    full = RequestProgress("a", reach, reach, limits.kv_blocks)
    report = Report(
        1, 1, progress=(full,), evicted=(full,), free_blocks=limits.kv_blocks,
        finished=(Completion("b", reach, FinishReason.STOP),), max_running=limits.max_running,
    )  # fmt: skip
    check_report(encode_report(report), hello)


def test_request_may_hold_more_than_the_capacity_of_all_layers() -> None:
    """As with a sliding window in most layers, or a server's own count of tokens."""
    limits = Limits(8, block_tokens=16, max_context_tokens=512)
    progress = (RequestProgress("a", 520, 512, 32),)
    check_report(encode_report(Report(1, 1, progress=progress)), hello_of(limits))


def test_impossible_numbers_are_named() -> None:
    limits = Limits(8, block_tokens=16, max_context_tokens=512)
    with pytest.raises(InvalidArgument, match="free_blocks: must be at most 8, got 9"):
        check_report(encode_report(Report(1, 1, free_blocks=9)), hello_of(limits))
    progress = (RequestProgress("a", 5_000, 512, 32),)
    with pytest.raises(InvalidArgument, match="output_tokens"):
        check_report(encode_report(Report(1, 1, progress=progress)), hello_of(limits))
