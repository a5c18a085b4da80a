"""What a worker may say: checked before any of it reaches the core. Pure."""

from collections.abc import Sequence
from math import inf

from protos.generated import scheduler_pb2
from services.runtime.border import COUNT, Bounds, check_bounds, check_name, check_times
from services.runtime.errors import InvalidArgument

MAX_HELD = 2**17  # requests of an earlier stream
NAMES: Sequence[str] = ("worker_id", "address", "model")
REQUEST_NAMES: Sequence[str] = (
    "model",
    "application",
    "worker_id",
    "tenant",
    "traceparent",
    "adapter",
    "key_name",
)
REQUEST_COUNTS = ("prompt_tokens", "delivered_tokens", "max_tokens", "min_tokens")
REQUEST_BOUNDS: Bounds = dict.fromkeys(REQUEST_COUNTS, COUNT) | {
    "weight": (0, 1_000),
    "length_quantile": (0, 1),
}
CANCEL_BOUNDS: Bounds = {"output_tokens": COUNT}
BUDGETS: Bounds = dict.fromkeys(("ttft_s", "tpot_s", "mtpot_s"), (0, inf))
MAX_TEXT_CHARS = 2**20  # of each part of a prompt's text
MAX_ANSWERS = 1_024  # earlier ones of a conversation
# Least and most of each number: above all hardware there is, and far below what overflows.
BOUNDS: Bounds = {
    "block_tokens": (1, 2**16),
    "kv_tokens": (1, 2**40),
    "max_running": (1, 2**20),
    "max_context_tokens": (1, 2**31),
    "kv_bytes_per_token": (0, 2**40),
    "host_tokens": (0, 2**44),
    "max_batch_tokens": (0, 2**31),
    "report_every_steps": (0, 2**20),
    "adapter_slots": (0, 2**16),
    "adapter_turn_steps": (0, 2**31),
}


def check_hello(hello: scheduler_pb2.WorkerHello) -> None:
    """Raises InvalidArgument, which names the field. O(held requests + profile)."""
    for name in NAMES:
        check_name(name, getattr(hello, name))
    check_bounds(hello, BOUNDS)
    if hello.kv_tokens < hello.block_tokens:
        message = f"must hold a block of {hello.block_tokens} tokens, got {hello.kv_tokens}"
        raise InvalidArgument("kv_tokens", message)
    if len(hello.held) > MAX_HELD:
        raise InvalidArgument("held", f"must be at most {MAX_HELD} requests, got {len(hello.held)}")
    for held in hello.held:
        check_name("held.request_id", held.request_id)
    check_times("profile", hello.profile)
    check_times("swaps", hello.swaps)


def check_request(request: scheduler_pb2.NewRequest) -> None:
    """Raises InvalidArgument, which names the field. O(1)."""
    check_name("request_id", request.request_id)
    for name in REQUEST_NAMES:
        check_name(name, getattr(request, name), least=0)
    check_bounds(request, REQUEST_BOUNDS)
    check_bounds(request.sla, BUDGETS)  # 0 if it is not set
    text = request.text
    if max(len(text.instruction), len(text.user_input)) > MAX_TEXT_CHARS:
        raise InvalidArgument("text", f"each part must have at most {MAX_TEXT_CHARS} characters")
    if len(text.answer_tokens) > MAX_ANSWERS:
        raise InvalidArgument("text.answer_tokens", f"must be at most {MAX_ANSWERS}")


def check_cancel(cancel: scheduler_pb2.CancelRequest) -> None:
    """Raises InvalidArgument, which names the field."""
    check_name("request_id", cancel.request_id)
    check_bounds(cancel, CANCEL_BOUNDS)


def check_report(report: scheduler_pb2.Report, hello: scheduler_pb2.WorkerHello) -> None:
    """Raises InvalidArgument for numbers that a worker of this hello cannot have. O(rows)."""
    check_times("timings", report.timings)
    check_times("swaps", report.swaps)
    blocks = hello.kv_tokens // hello.block_tokens
    # A server behind a worker may count output in other tokens. Layers with a sliding window hold
    # more tokens of a request than the announced capacity, which is that of all layers.
    output = 2 * hello.max_context_tokens
    held = max(hello.kv_tokens, hello.host_tokens, output)
    columns, evicted = report.progress, report.evicted
    rows = len(columns.request_ids) + len(report.finished) + len(evicted)
    for name, most, values in (
        ("progress, finished and evicted", MAX_HELD, [rows]),
        ("free_blocks", blocks, [report.free_blocks]),
        ("max_running", hello.max_running, [report.max_running]),
        ("progress.blocks", -(-held // hello.block_tokens), columns.blocks),
        ("progress.held_tokens", held, columns.held_tokens),
        ("progress.output_tokens", output, columns.output_tokens),
        ("evicted.held_tokens", held, [each.held_tokens for each in evicted]),
        ("evicted.output_tokens", output, [each.output_tokens for each in evicted]),
        ("finished.output_tokens", output, [each.output_tokens for each in report.finished]),
    ):
        value = max(values, default=0)
        if value > most:
            raise InvalidArgument(name, f"must be at most {most}, got {value}")
