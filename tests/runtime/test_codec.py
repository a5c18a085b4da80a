"""Round trips of core types through messages, with all fields."""

from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.generated import common_pb2, estimator_pb2, scheduler_pb2, worker_pb2
from services.core import (
    Completion,
    FinishReason,
    Grant,
    HeldRequest,
    Outcome,
    Pause,
    Plan,
    QueueOrder,
    Reject,
    RejectReason,
    Report,
    RequestProgress,
    Residency,
    Sla,
    StaticBatch,
    WorkerView,
)
from services.costs import (
    BatchTiming,
    CostModel,
    Direction,
    KVCosts,
    Neighbours,
    StepTiming,
    SwapTiming,
)
from services.forecast import UNCAPPED, Forecast
from services.runtime.codecs import attach as attach_codec
from services.runtime.codecs import common as codec
from services.runtime.errors import InvalidArgument
from services.scheduler.codec import encode_request_event
from services.scheduler.core import events as ev
from services.worker.codec import decode_prompt
from services.worker.requests.types.prompt import Prompt, SamplingParams

NAMES = st.text(max_size=12)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INT64 = st.integers(0, 2**63 - 1)
SECONDS = st.floats(0, allow_nan=False)
REASONS = st.sampled_from(FinishReason)


def many(strategy: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(strategy, max_size=4).map(tuple)


GRANTS = many(st.builds(Grant, NAMES, UINT32))
TIMINGS = st.builds(StepTiming, UINT32, UINT32, UINT64, SECONDS)
SWAPS = st.builds(SwapTiming, st.sampled_from(Direction), UINT32, SECONDS)
PROGRESS = many(st.builds(RequestProgress, NAMES, UINT32, UINT32, UINT32))
PLANS = st.builds(
    Plan,
    seq=UINT64,
    admit=GRANTS,
    extend=GRANTS,
    pause=many(st.builds(Pause, NAMES, st.sampled_from(Residency))),
    prefetch=many(NAMES),
    cancel=many(NAMES),
    victims=many(NAMES),
    order=many(st.tuples(NAMES, SECONDS)).map(QueueOrder.of),
    residency=NAMES,
    costs=st.builds(KVCosts, SECONDS, SECONDS, SECONDS),
    batches=many(st.builds(StaticBatch, UINT64, many(NAMES))),
    prefix_blocks=UINT32,
)
TOKENS_PER_STEP = st.floats(1, 33)
HASHES = many(st.integers(-(2**63), 2**63 - 1).filter(bool))
REPORTS = st.builds(
    Report,
    seq=UINT64,
    applied_plan_seq=UINT64,
    progress=PROGRESS,
    finished=many(st.builds(Completion, NAMES, UINT32, REASONS)),
    evicted=PROGRESS,
    timings=many(TIMINGS),
    swaps=many(SWAPS),
    free_blocks=UINT32,
    shared_blocks=UINT32,
    prefixes_added=HASHES,
    prefixes_gone=HASHES,
    tokens_per_step=TOKENS_PER_STEP,
    max_running=UINT32,
)
HELD = many(st.builds(HeldRequest, NAMES, *(UINT32,) * 5, st.booleans(), UINT32))
COSTS = st.builds(
    CostModel,
    *(SECONDS,) * 4,
    version=INT64,
    source=NAMES,
    error_p50=SECONDS,
    error_p90=SECONDS,
    samples=UINT32,
    offload_token_s=SECONDS,
    upload_token_s=SECONDS,
    tokens_per_step=TOKENS_PER_STEP,
)
OUTCOMES = st.builds(Outcome, NAMES, NAMES, NAMES, UINT32, UINT32, UINT32, REASONS, SECONDS, UINT32)


@given(PLANS)
def test_plan_round_trip(plan: Plan) -> None:
    sent = scheduler_pb2.Plan.FromString(attach_codec.encode_plan(plan).SerializeToString())
    assert attach_codec.decode_plan(sent) == plan


@given(REPORTS)
def test_report_round_trip(report: Report) -> None:
    sent = scheduler_pb2.Report.FromString(attach_codec.encode_report(report).SerializeToString())
    assert attach_codec.decode_report(sent) == report


def test_progress_is_sent_as_columns() -> None:
    rows = (RequestProgress("a", 5, 12, 1), RequestProgress("b", 0, 7))
    sent = attach_codec.encode_report(Report(seq=1, applied_plan_seq=0, progress=rows)).progress
    assert (list(sent.request_ids), list(sent.output_tokens)) == (["a", "b"], [5, 0])
    assert (list(sent.held_tokens), list(sent.blocks)) == ([12, 7], [1, 0])
    sent.blocks.pop()
    with pytest.raises(InvalidArgument, match="columns of different lengths"):
        attach_codec.decode_report(scheduler_pb2.Report(progress=sent))


def test_plan_with_columns_of_different_lengths_is_refused() -> None:
    for field, columns in (
        ("admit", scheduler_pb2.GrantColumns(request_ids=["a", "b"], limit_tokens=[1])),
        ("extend", scheduler_pb2.GrantColumns(request_ids=["a"])),
        ("pause", scheduler_pb2.PauseColumns(residencies=[scheduler_pb2.RESIDENCY_KEEP])),
        ("order", scheduler_pb2.QueueOrder(request_ids=["a"], wait_s=[0.5, 1.0])),
    ):
        sent: dict[str, Any] = {field: columns}
        with pytest.raises(InvalidArgument, match=f"{field}: has columns of different lengths"):
            attach_codec.decode_plan(scheduler_pb2.Plan(**sent))


@given(HELD)
def test_held_requests_round_trip(held: tuple[HeldRequest, ...]) -> None:
    hello = scheduler_pb2.WorkerHello(held=[attach_codec.encode_held(request) for request in held])
    sent = scheduler_pb2.WorkerHello.FromString(hello.SerializeToString())
    assert attach_codec.decode_held(sent) == held


@given(NAMES, COSTS)
def test_cost_model_round_trip(worker_id: str, model: CostModel) -> None:
    message = codec.encode_cost_model(worker_id, model)
    assert (message.worker_id, codec.decode_cost_model(message)) == (worker_id, model)


@given(OUTCOMES)
def test_outcome_round_trip(outcome: Outcome) -> None:
    assert codec.decode_outcome(codec.encode_outcome(outcome)) == outcome


@given(st.builds(Sla, NAMES.filter(bool), SECONDS, SECONDS, SECONDS))
def test_sla_round_trip(sla: Sla) -> None:
    assert codec.decode_sla(codec.encode_sla(sla)) == sla


VIEW = WorkerView(
    "w",
    "unix:/w",
    "demo",
    6_400,
    16,
    32,
    2_048,
    512,
    25_600,
    "imports 2.5 s",
    "float32 on cpu (configured)",
    512,
    8,
    3,
    32,
    9,
)
ALL_SET: dict[str, Plan | Report | CostModel | Outcome] = {
    "plan": Plan(
        3, (Grant("a", 9),), (Grant("b", 8),), (Pause("c", Residency.OFFLOAD),), ("d",), ("e",),
        ("f",), QueueOrder(("a", "g"), (0.0, inf)), "swap",
        KVCosts(1e-4, 1e-6, 2e-6),
        (StaticBatch(1, ("a", "g")),),
        32,
    ),
    "report": Report(
        4, 3, (RequestProgress("a", 1, 9, 2),), (Completion("b", 2, FinishReason.STOP),),
        (RequestProgress("c", 3, 11, 4),), (StepTiming(1, 2, 3, 0.5),),
        (SwapTiming(Direction.UPLOAD, 7, 0.25, 0.125),), 640, 5, (-8, 9), (2**62,), 1.5, 7,
    ),
    "cost": CostModel(
        0.1, 0.2, 0.3, 0.4, 5, "linear", 0.6, 0.7, 8, 0.9, 1.0, 1.1, 12,
        Neighbours((1, 2, 3, 0.4), 7), 1.5,
    ),
    "outcome": Outcome("r", "m", "a", 1, 2, 3, FinishReason.LENGTH, 4.0, 5, "ada", "s-1"),
}  # fmt: skip


def test_every_field_is_encoded() -> None:
    """Each example sets every field, so that a new field without an example fails."""
    for made in ALL_SET.values():
        assert all(getattr(made, name) for name in made.__dataclass_fields__), made
    plan, report, cost, outcome = ALL_SET.values()
    assert isinstance(plan, Plan)
    assert attach_codec.decode_plan(attach_codec.encode_plan(plan)) == plan
    assert isinstance(report, Report)
    assert attach_codec.decode_report(attach_codec.encode_report(report)) == report
    assert isinstance(cost, CostModel)
    assert codec.decode_cost_model(codec.encode_cost_model("w", cost)) == cost
    assert isinstance(outcome, Outcome)
    assert codec.decode_outcome(codec.encode_outcome(outcome), outcome.reporter) == outcome


def test_impossible_batch_timing_and_neighbours_are_errors() -> None:
    batch = BatchTiming(7, 300, 128, 4.5)
    assert codec.decode_batch(codec.encode_batch(batch)) == batch
    assert codec.decode_cost_model(estimator_pb2.CostModel()).neighbours == Neighbours()
    for rows in ([1.0] * 5, [1.0, 1.0, 1.0, nan], [1.0] * 4 * 257):
        with pytest.raises(ValueError):
            codec.decode_cost_model(estimator_pb2.CostModel(neighbours=rows))


def test_worker_hello_round_trip() -> None:
    hello = scheduler_pb2.WorkerHello(
        worker_id="w", address="unix:/w", model="demo", kv_tokens=6_400, block_tokens=16,
        max_running=32, max_context_tokens=2_048, kv_bytes_per_token=512, host_tokens=25_600,
        start="imports 2.5 s", placement="float32 on cpu (configured)",
        max_batch_tokens=512, report_every_steps=8, adapter_slots=3, adapter_turn_steps=32,
        epoch=9,
    )  # fmt: skip
    assert all(getattr(VIEW, name) for name in VIEW.__dataclass_fields__)
    assert attach_codec.decode_worker_hello(hello) == VIEW
    hello.start = "x" * 9_999
    assert len(attach_codec.decode_worker_hello(hello).start) == attach_codec.START_CHARS


def test_prompt_round_trip() -> None:
    sampling = common_pb2.Sampling(temperature=0.5, seed=7, logprobs=0, max_tokens=9, n=1)
    message = worker_pb2.Prompt(
        request_id="r", token_ids=[1, 2, 3], prompt_tokens=2, max_tokens=9, sampling=sampling,
        cache_salt="tenant",
    )  # fmt: skip
    drawn = SamplingParams(temperature=0.5, seed=7, logprobs=0)
    assert decode_prompt(message, "g#1") == Prompt("r", (1, 2, 3), 2, 9, drawn, "g#1", "tenant")


def test_prompt_token_fields_are_validated() -> None:
    sampling = common_pb2.Sampling(
        stop_token_ids=[9, 8], logit_bias={7: -1.5, 3: 2.0}, allowed_token_ids=[3, 7, 9],
        bad_tokens=[common_pb2.TokenIds(ids=[3]), common_pb2.TokenIds(ids=[7, 3])],
        bad_words=["x"], prompt_logprobs=0, include_stop_str_in_output=True,
        skip_special_tokens=False, spaces_between_special_tokens=False,
    )  # fmt: skip
    message = worker_pb2.Prompt(token_ids=[1], prompt_tokens=1, max_tokens=9, sampling=sampling)
    decoded = decode_prompt(message, "").sampling
    assert decoded == SamplingParams(
        stop_token_ids=(9, 8), logit_bias=((3, 2.0), (7, -1.5)), allowed_token_ids=(3, 7, 9),
        bad_tokens=((3,), (7, 3)), prompt_logprobs=0,
    )  # fmt: skip
    assert hash(decoded) == hash(decode_prompt(message, "g").sampling), "it must be immutable"
    message.sampling.bad_tokens.add()
    with pytest.raises(ValueError, match="bad_tokens"):
        decode_prompt(message, "")


def test_prompt_scores_too_large_for_a_message_are_refused() -> None:
    sampling = common_pb2.Sampling(prompt_logprobs=20)
    message = worker_pb2.Prompt(
        token_ids=range(30_000), prompt_tokens=30_000, max_tokens=1, sampling=sampling
    )
    with pytest.raises(
        ValueError, match=r"prompt_logprobs 20 needs a prompt of at most \d+ tokens"
    ):
        decode_prompt(message, "")
    sampling.prompt_logprobs = 1
    message.sampling.CopyFrom(sampling)
    assert decode_prompt(message, "").sampling.prompt_logprobs == 1


def test_swaps_of_unknown_direction_are_dropped() -> None:
    message = scheduler_pb2.Report(
        swaps=[
            common_pb2.SwapTiming(tokens=5, elapsed_s=1.0),
            common_pb2.SwapTiming(direction=common_pb2.DIRECTION_OFFLOAD, tokens=6, elapsed_s=1.0),
        ]
    )
    assert attach_codec.decode_report(message).swaps == (SwapTiming(Direction.OFFLOAD, 6, 1.0),)


@pytest.mark.parametrize("given", [0.0, 0.5, nan, inf, -1.0])
def test_a_step_gives_a_token_or_more(given: float) -> None:
    """An older worker, which drafts nothing, sends 0."""
    message = scheduler_pb2.Report(tokens_per_step=given)
    assert attach_codec.decode_report(message).tokens_per_step == 1


@pytest.mark.parametrize("bad", [nan, -1.0, -inf])
def test_unsortable_waits_and_costs_become_zero(bad: float) -> None:
    message = scheduler_pb2.Plan(
        order=scheduler_pb2.QueueOrder(request_ids=["a"], wait_s=[bad]),
        costs=scheduler_pb2.KVCosts(recompute_token_s=bad, offload_token_s=bad, upload_token_s=bad),
    )
    plan = attach_codec.decode_plan(message)
    assert (plan.order, plan.costs) == (QueueOrder(("a",), (0.0,)), KVCosts())


def test_plan_of_an_older_scheduler_has_no_order() -> None:
    plan = attach_codec.decode_plan(scheduler_pb2.Plan(seq=1))
    assert (plan.order, plan.residency, plan.costs) == (QueueOrder(), "", KVCosts())


@pytest.mark.parametrize(
    ("action", "event"),
    [
        (
            ev.Place("g", "r", "w", "unix:/w", 0.5),
            {"placed": {"worker_id": "w", "worker_address": "unix:/w", "queued_s": 0.5}},
        ),
        (ev.Preempt("g", "r", 7), {"preempted": {"output_tokens": 7}}),
        (ev.Resume("g", "r", 48), {"resumed": {"held_tokens": 48}}),
        (ev.Resume("g", "r", 0), {"resumed": {}}),
        (ev.SendLengthBound("g", "r", 7), {"length_bound": {"output_tokens": 7}}),
        (
            ev.Finish("g", "r", FinishReason.STOP, 7, 2, 0.5),
            {
                "finished": {
                    "reason": common_pb2.FINISH_REASON_STOP, "output_tokens": 7,
                    "preemptions": 2, "queued_s": 0.5,
                }
            },
        ),
        (
            ev.Refuse("g", "r", Reject(RejectReason.QUEUE_FULL, "full", 2.0)),
            {
                "rejected": {
                    "reason": scheduler_pb2.REJECT_REASON_QUEUE_FULL, "message": "full",
                    "retry_after_s": 2.0,
                }
            },
        ),
    ],
)  # fmt: skip
def test_gateway_events_are_encoded(action: ev.GatewayMessage, event: dict[str, Any]) -> None:
    expected = scheduler_pb2.RequestEvent(request_id="r", **event)
    assert encode_request_event(action) == scheduler_pb2.SchedulerEvent(request=expected)


def test_forecast_is_truncated_unless_shared() -> None:
    """A request past the last point of its forecast, 24, is expected to make 24 tokens more."""
    own = Forecast((10.0, 24.0), (0.5, 0.5), 1_024, "ridge", 3)
    back = codec.decode_forecast(codec.encode_forecast(own), 1_024)
    assert back == own
    assert back.mean_remaining(124) == pytest.approx(24)
    assert codec.decode_forecast(codec.encode_forecast(own), 16).points == (10, 16)
    assert codec.decode_forecast(codec.encode_forecast(own)).mean_remaining(1_024) > 0
    shared = Forecast((5.0, UNCAPPED), (0.5, 0.5), UNCAPPED, "history", 1, "history/demo")
    assert codec.decode_forecast(codec.encode_forecast(shared), 60) == shared
