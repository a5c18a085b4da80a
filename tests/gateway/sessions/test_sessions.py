"""Transcripts of the session handlers: messages sent to each peer in virtual time."""

import time
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.sessions.call import ClientCall
from gateway.sessions.sessions import Sessions
from gateway.types.client_request import ClientRequest
from gateway.types.generation import GenerationRequest, Sampling
from protos.generated import common_pb2 as common
from protos.generated import scheduler_pb2 as sched
from protos.generated import worker_pb2
from services.core import FinishReason, Sla
from tests.gateway.gateway_fakes import demo_folder, demo_text
from tests.gateway.gateway_fixtures import IDS, LENGTH, STOP

HERE, THERE = "here:1", "there:1"
SWEEP_S = 0.1


@dataclass
class Wires:
    """A pipeline, what it has sent, and the moment as it was last told. A worker's stream is
    open where `open` says."""

    sessions: Sessions = field(init=False)
    reported: list[sched.SubmitMessage] = field(default_factory=list)
    prompts: list[tuple[str, worker_pb2.Prompt]] = field(default_factory=list)
    now_s: float = field(default_factory=time.monotonic)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        config = GatewayConfig(
            model=demo_folder(), retry_share=0.0, retry_floor_per_s=0.1, late_wait_s=60.0
        )
        self.sessions = Sessions(
            config, demo_text(), Metrics(self.registry), self.reported.append, self._prompt
        )
        self.connect()
        for address in (HERE, THERE):
            self.sessions.placement.on_worker_stream(address, time.monotonic())

    def _prompt(self, address: str, message: worker_pb2.WorkerInput) -> bool:
        self.prompts.append((address, message.prompt))
        return True

    def connect(self) -> None:
        """The scheduler's stream opens (anew)."""
        self.sessions.placement.on_scheduler_lost()
        self.sessions.placement.on_event(
            sched.SchedulerEvent(fleet=sched.FleetView()), time.monotonic()
        )

    def reopen(self, address: str) -> None:
        """The worker's stream breaks and opens again."""
        self.sessions.placement.on_worker_lost(address)
        for message in self.sessions.placement.on_worker_stream(address, time.monotonic()):
            self.prompts.append((address, message.prompt))

    def ask(self, max_tokens: int = 50, include_forecast: bool = False) -> tuple[ClientCall, str]:
        """A request that is placed at HERE, and its id."""
        sampling = Sampling(seed=1, max_tokens=max_tokens)
        sla = Sla("standard")
        client = ClientRequest(None, include_forecast=include_forecast)
        generation = GenerationRequest(client, (1, 2), sampling, sla, time.monotonic())
        call = self.sessions.open([generation])
        name = self.reported[-1].request.request_id
        self.say(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
        return call, name

    def say(self, name: str, **event: Any) -> None:
        """The scheduler's word."""
        request = sched.RequestEvent(request_id=name, **event)
        self.sessions.placement.on_event(sched.SchedulerEvent(request=request), time.monotonic())

    def bring(
        self, name: str, offset: int, ids: list[int],
        reason: common.FinishReason.ValueType = common.FINISH_REASON_UNSPECIFIED,
    ) -> None:  # fmt: skip
        """A worker's tokens, from HERE."""
        tokens = worker_pb2.RequestTokens(
            request_id=name, offset=offset, token_ids=ids, finish_reason=reason
        )
        self.sessions.delivery.on_tokens(
            HERE, worker_pb2.TokenBatch(requests=[tokens]), time.monotonic()
        )

    def listen(self, for_s: float, others: bool = False) -> None:
        """Sweeps, a tenth of a second apart; `others`: HERE brings tokens of other requests."""
        for _ in range(round(for_s / SWEEP_S)):
            self.now_s += SWEEP_S
            if others:
                self.bring("another", 0, [1])
            self.sessions.recovery.sweep(self.now_s, 0.0)

    def heard(self) -> list[str]:
        """What the scheduler was told since this was last asked, a line each."""
        lines = [_line(message) for message in self.reported]
        self.reported.clear()
        return lines

    def resubmitted(self, cause: str) -> float:
        labels = {"cause": cause}
        return self.registry.get_sample_value("foretoken_resubmissions_total", labels) or 0


def _line(message: sched.SubmitMessage) -> str:
    if message.HasField("cancel"):
        reason = common.FinishReason.Name(message.cancel.reason).removeprefix("FINISH_REASON_")
        return f"cancel {reason} at {message.cancel.output_tokens}"
    where = message.request.worker_id
    attempt = message.request.request_id.partition("~")[2] or "0"
    return f"request ~{attempt} with {message.request.delivered_tokens}" + f" at {where}" * bool(
        where
    )


def over(call: ClientCall) -> tuple[list[int], FinishReason | None]:
    (live,) = call.choices
    return live.session.output, live.session.reason


def ended(tokens: int) -> sched.Finished:
    return sched.Finished(reason=STOP, output_tokens=tokens)


async def test_recovery_waits_for_late_tokens_while_the_stream_is_active() -> None:
    wires = Wires()
    call, name = wires.ask()
    wires.bring(name, 0, IDS[:2])
    wires.say(name, finished=ended(len(IDS)))
    wires.listen(20.0, others=True)
    assert wires.heard() == ["request ~0 with 0"]
    wires.bring(name, 2, IDS[2:], STOP)
    assert over(call) == (IDS, FinishReason.STOP)
    assert wires.heard() == []


async def test_recovery_ignores_time_in_which_the_loop_was_blocked() -> None:
    wires = Wires()
    call, name = wires.ask()
    wires.listen(0.1)
    wires.say(name, finished=ended(len(IDS)))
    wires.now_s += 5.0  # the loop was busy with something else
    wires.listen(0.2)
    wires.bring(name, 0, IDS, STOP)
    assert over(call) == (IDS, FinishReason.STOP)
    assert wires.heard() == ["request ~0 with 0"]


async def test_recovery_resubmits_when_the_stream_is_silent() -> None:
    wires = Wires()
    _, name = wires.ask()
    wires.bring(name, 0, IDS[:2])
    wires.listen(30.0)  # nothing is due yet
    wires.say(name, finished=ended(len(IDS)))
    wires.listen(1.0)
    wires.bring("another", 0, [1])
    wires.listen(1.9)
    assert wires.heard() == ["request ~0 with 0"]
    wires.listen(0.4)
    assert wires.heard() == ["cancel CANCELLED at 2", "request ~1 with 2"]
    assert wires.resubmitted("late") == 1


async def test_recovery_bounds_the_wait_for_late_tokens() -> None:
    wires = Wires()
    _, name = wires.ask()
    wires.say(name, finished=ended(len(IDS)))
    wires.listen(59.0, others=True)
    assert wires.heard() == ["request ~0 with 0"]
    wires.listen(1.5, others=True)
    assert wires.heard() == ["cancel CANCELLED at 0", "request ~1 with 0"]


async def test_reopened_stream_loses_pending_tokens() -> None:
    wires = Wires()
    _, name = wires.ask()
    wires.say(name, finished=ended(len(IDS)))
    wires.reopen(THERE)
    assert wires.heard() == ["request ~0 with 0"]
    wires.reopen(HERE)
    assert wires.heard() == ["cancel CANCELLED at 0", "request ~1 with 0"]
    assert wires.resubmitted("worker") == 1


async def test_complete_answer_ends_without_the_worker_s_end() -> None:
    wires = Wires()
    call, name = wires.ask()
    wires.bring(name, 0, IDS)
    wires.say(name, finished=ended(len(IDS)))
    wires.listen(0.1)
    assert over(call) == (IDS, FinishReason.STOP)
    assert wires.heard() == ["request ~0 with 0"]


async def test_lost_worker_s_requests_are_resubmitted_once_and_again_after_progress() -> None:
    wires = Wires()  # with a budget of one retry
    names = [wires.ask()[1] for _ in range(300)]
    assert len(wires.sessions.table) == len(names)
    wires.heard()
    wires.reopen(HERE)
    assert sum(line == "request ~1 with 0" for line in wires.heard()) == len(names)
    for name in (f"{name}~1" for name in names):
        wires.say(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    for name in names[:200]:
        wires.bring(f"{name}~1", 0, IDS[:1])
    wires.reopen(HERE)
    lines = wires.heard()
    assert sum(line == "request ~2 with 1" for line in lines) == 200
    assert sum(line == "request ~2 with 0" for line in lines) == 1  # the budget's
    assert len(wires.sessions.table) == 201


async def test_finished_request_is_not_announced() -> None:
    wires = Wires()
    call, name = wires.ask()
    wires.say(name, finished=ended(len(IDS)))
    wires.connect()
    wires.listen(1.0)
    assert wires.heard() == ["request ~0 with 0"]
    wires.bring(name, 0, IDS, STOP)
    assert over(call) == (IDS, FinishReason.STOP)


async def test_announced_request_is_cancelled_at_its_end() -> None:
    """Else it would wait for its worker to say that it has what is over."""
    wires = Wires()
    (_, first), (_, second), (call, third) = (wires.ask() for _ in range(3))
    wires.heard()
    wires.connect()
    assert wires.heard() == ["request ~0 with 0 at h"] * 3
    wires.bring(first, 0, IDS, STOP)
    assert wires.heard() == [f"cancel STOP at {len(IDS)}"]
    wires.bring(second, 0, IDS, LENGTH)
    assert wires.heard() == [f"cancel CANCELLED at {len(IDS)}"]
    wires.say(third, placed=sched.Placed(worker_id="h", worker_address=HERE))
    wires.bring(third, 0, IDS, STOP)
    assert (over(call), wires.heard()) == ((IDS, FinishReason.STOP), [])


async def test_adopted_request_is_prompted_again_after_a_pause() -> None:
    wires = Wires()
    _, name = wires.ask()
    here = sched.Placed(worker_id="h", worker_address=HERE)
    wires.connect()
    wires.say(name, placed=here)
    assert len(wires.prompts) == 1
    wires.bring(name, 0, IDS[:2])
    wires.say(name, preempted=sched.Preempted(output_tokens=2))
    wires.say(name, placed=here)
    assert [list(prompt.token_ids) for _, prompt in wires.prompts] == [[1, 2], [1, 2, *IDS[:2]]]


async def test_paused_request_is_prompted_when_a_new_scheduler_places_it() -> None:
    wires = Wires()
    _, name = wires.ask()
    wires.say(name, preempted=sched.Preempted())
    wires.connect()
    wires.say(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    assert [prompt.request_id for _, prompt in wires.prompts] == [name, name]


async def test_reopened_stream_before_the_scheduler_s_answer_resubmits() -> None:
    wires = Wires()
    _, name = wires.ask()
    wires.connect()
    wires.reopen(HERE)
    assert wires.heard() == [
        "request ~0 with 0", "request ~0 with 0 at h", "cancel CANCELLED at 0", "request ~1 with 0",
    ]  # fmt: skip
    wires.say(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    assert len(wires.prompts) == 1


async def test_prompt_is_scored_once_over_all_placements() -> None:
    """Where its scores are known before its stream breaks, cached KV serves the second time."""
    t = Wires()
    sampling = Sampling(seed=1, max_tokens=9, prompt_logprobs=0)
    client = ClientRequest(None)
    asked = GenerationRequest(client, (1, 2), sampling, Sla("standard"), time.monotonic())
    t.sessions.open([asked])
    name = t.reported[-1].request.request_id
    t.say(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    scores = [common.TokenLogprob(token_id=2, logprob=-1.0)]
    tokens = worker_pb2.RequestTokens(request_id=name, token_ids=[40], prompt_logprobs=scores)
    t.sessions.delivery.on_tokens(HERE, worker_pb2.TokenBatch(requests=[tokens]), time.monotonic())
    t.reopen(HERE)
    again = t.reported[-1].request.request_id
    t.say(again, placed=sched.Placed(worker_id="h", worker_address=HERE))
    sent = [prompt.sampling.HasField("prompt_logprobs") for _, prompt in t.prompts]
    assert sent == [True, False]
