"""Transcripts of the session handlers: messages sent to each peer in virtual time."""

import time
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.config import GatewayConfig
from gateway.metrics import Metrics
from gateway.sessions.call import ClientCall
from gateway.sessions.event_pace import EventPace
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
class SessionTranscript:
    """Sessions, the messages that they have sent, and the time of the last sweep."""

    sessions: Sessions = field(init=False)
    to_scheduler: list[sched.SubmitMessage] = field(default_factory=list)
    prompts: list[tuple[str, worker_pb2.Prompt]] = field(default_factory=list)
    now_s: float = field(default_factory=time.monotonic)
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        config = GatewayConfig(
            model=demo_folder(), retry_share=0.0, retry_floor_per_s=0.1, late_wait_s=60.0
        )
        self.sessions = Sessions(
            config,
            demo_text(),
            Metrics(self.registry),
            self.to_scheduler.append,
            self._prompt,
            EventPace(config.max_messages_per_s, config.max_pause_s),
            lambda: len(self.sessions.table),
        )
        self.reopen_scheduler()
        for address in (HERE, THERE):
            self.sessions.placement.on_worker_stream(address, time.monotonic())

    def _prompt(self, address: str, message: worker_pb2.WorkerInput) -> bool:
        self.prompts.append((address, message.prompt))
        return True

    def reopen_scheduler(self) -> None:
        """The scheduler's stream opens, or reopens."""
        self.sessions.placement.on_scheduler_lost()
        self.sessions.placement.on_event(
            sched.SchedulerEvent(fleet=sched.FleetView()), time.monotonic()
        )

    def reopen_worker(self, address: str) -> None:
        """The worker's stream breaks and opens again."""
        self.sessions.placement.on_worker_lost(address)
        for message in self.sessions.placement.on_worker_stream(address, time.monotonic()):
            self.prompts.append((address, message.prompt))

    def open_request(
        self, max_tokens: int = 50, include_forecast: bool = False
    ) -> tuple[ClientCall, str]:
        """A request that is placed at HERE, and its id."""
        sampling = Sampling(seed=1, max_tokens=max_tokens)
        sla = Sla("standard")
        client = ClientRequest(None, include_forecast=include_forecast)
        generation = GenerationRequest(client, (1, 2), sampling, sla, time.monotonic())
        call = self.sessions.open([generation])
        name = self.to_scheduler[-1].request.request_id
        self.send_event(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
        return call, name

    def send_event(self, name: str, **event: Any) -> None:
        """The scheduler sends an event."""
        request = sched.RequestEvent(request_id=name, **event)
        self.sessions.placement.on_event(sched.SchedulerEvent(request=request), time.monotonic())

    def send_tokens(
        self, name: str, offset: int, ids: list[int],
        reason: common.FinishReason.ValueType = common.FINISH_REASON_UNSPECIFIED,
    ) -> None:  # fmt: skip
        """The worker HERE sends tokens."""
        tokens = worker_pb2.RequestTokens(
            request_id=name, offset=offset, token_ids=ids, finish_reason=reason
        )
        self.sessions.delivery.on_tokens(
            HERE, worker_pb2.TokenBatch(requests=[tokens]), time.monotonic()
        )

    def sweep(self, for_s: float, others: bool = False) -> None:
        """Sweeps each tenth of a second; `others`: HERE sends tokens of other requests."""
        for _ in range(round(for_s / SWEEP_S)):
            self.now_s += SWEEP_S
            if others:
                self.send_tokens("another", 0, [1])
            self.sessions.recovery.sweep(self.now_s, 0.0)

    def pop_sent(self) -> list[str]:
        """The messages to the scheduler since the last call, one line each."""
        lines = [_line(message) for message in self.to_scheduler]
        self.to_scheduler.clear()
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


def output_and_reason(call: ClientCall) -> tuple[list[int], FinishReason | None]:
    (live,) = call.choices
    return live.session.output, live.session.reason


def finished_after(tokens: int) -> sched.Finished:
    return sched.Finished(reason=STOP, output_tokens=tokens)


async def test_recovery_waits_for_late_tokens_while_the_stream_is_active() -> None:
    transcript = SessionTranscript()
    call, name = transcript.open_request()
    transcript.send_tokens(name, 0, IDS[:2])
    transcript.send_event(name, finished=finished_after(len(IDS)))
    transcript.sweep(20.0, others=True)
    assert transcript.pop_sent() == ["request ~0 with 0"]
    transcript.send_tokens(name, 2, IDS[2:], STOP)
    assert output_and_reason(call) == (IDS, FinishReason.STOP)
    assert transcript.pop_sent() == []


async def test_recovery_ignores_time_in_which_the_loop_was_blocked() -> None:
    transcript = SessionTranscript()
    call, name = transcript.open_request()
    transcript.sweep(0.1)
    transcript.send_event(name, finished=finished_after(len(IDS)))
    transcript.now_s += 5.0  # the event loop was blocked
    transcript.sweep(0.2)
    transcript.send_tokens(name, 0, IDS, STOP)
    assert output_and_reason(call) == (IDS, FinishReason.STOP)
    assert transcript.pop_sent() == ["request ~0 with 0"]


async def test_recovery_resubmits_when_the_stream_is_silent() -> None:
    transcript = SessionTranscript()
    _, name = transcript.open_request()
    transcript.send_tokens(name, 0, IDS[:2])
    transcript.sweep(30.0)  # no tokens are expected yet
    transcript.send_event(name, finished=finished_after(len(IDS)))
    transcript.sweep(1.0)
    transcript.send_tokens("another", 0, [1])
    transcript.sweep(1.9)
    assert transcript.pop_sent() == ["request ~0 with 0"]
    transcript.sweep(0.4)
    assert transcript.pop_sent() == ["cancel CANCELLED at 2", "request ~1 with 2"]
    assert transcript.resubmitted("late") == 1


async def test_recovery_bounds_the_wait_for_late_tokens() -> None:
    transcript = SessionTranscript()
    _, name = transcript.open_request()
    transcript.send_event(name, finished=finished_after(len(IDS)))
    transcript.sweep(59.0, others=True)
    assert transcript.pop_sent() == ["request ~0 with 0"]
    transcript.sweep(1.5, others=True)
    assert transcript.pop_sent() == ["cancel CANCELLED at 0", "request ~1 with 0"]


async def test_reopened_stream_loses_pending_tokens() -> None:
    transcript = SessionTranscript()
    _, name = transcript.open_request()
    transcript.send_event(name, finished=finished_after(len(IDS)))
    transcript.reopen_worker(THERE)
    assert transcript.pop_sent() == ["request ~0 with 0"]
    transcript.reopen_worker(HERE)
    assert transcript.pop_sent() == ["cancel CANCELLED at 0", "request ~1 with 0"]
    assert transcript.resubmitted("worker") == 1


async def test_complete_answer_ends_without_the_worker_s_end() -> None:
    transcript = SessionTranscript()
    call, name = transcript.open_request()
    transcript.send_tokens(name, 0, IDS)
    transcript.send_event(name, finished=finished_after(len(IDS)))
    transcript.sweep(0.1)
    assert output_and_reason(call) == (IDS, FinishReason.STOP)
    assert transcript.pop_sent() == ["request ~0 with 0"]


async def test_lost_worker_s_requests_are_resubmitted_once_and_again_after_progress() -> None:
    transcript = SessionTranscript()  # with a budget of one retry
    names = [transcript.open_request()[1] for _ in range(300)]
    assert len(transcript.sessions.table) == len(names)
    transcript.pop_sent()
    transcript.reopen_worker(HERE)
    assert sum(line == "request ~1 with 0" for line in transcript.pop_sent()) == len(names)
    for name in (f"{name}~1" for name in names):
        transcript.send_event(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    for name in names[:200]:
        transcript.send_tokens(f"{name}~1", 0, IDS[:1])
    transcript.reopen_worker(HERE)
    lines = transcript.pop_sent()
    assert sum(line == "request ~2 with 1" for line in lines) == 200
    assert sum(line == "request ~2 with 0" for line in lines) == 1  # from the retry budget
    assert len(transcript.sessions.table) == 201


async def test_finished_request_is_not_announced() -> None:
    transcript = SessionTranscript()
    call, name = transcript.open_request()
    transcript.send_event(name, finished=finished_after(len(IDS)))
    transcript.reopen_scheduler()
    transcript.sweep(1.0)
    assert transcript.pop_sent() == ["request ~0 with 0"]
    transcript.send_tokens(name, 0, IDS, STOP)
    assert output_and_reason(call) == (IDS, FinishReason.STOP)


async def test_announced_request_is_cancelled_at_its_end() -> None:
    """Otherwise the scheduler would wait for the worker's report of an finished_after request."""
    transcript = SessionTranscript()
    (_, first), (_, second), (call, third) = (transcript.open_request() for _ in range(3))
    transcript.pop_sent()
    transcript.reopen_scheduler()
    assert transcript.pop_sent() == ["request ~0 with 0 at h"] * 3
    transcript.send_tokens(first, 0, IDS, STOP)
    assert transcript.pop_sent() == [f"cancel STOP at {len(IDS)}"]
    transcript.send_tokens(second, 0, IDS, LENGTH)
    assert transcript.pop_sent() == [f"cancel CANCELLED at {len(IDS)}"]
    transcript.send_event(third, placed=sched.Placed(worker_id="h", worker_address=HERE))
    transcript.send_tokens(third, 0, IDS, STOP)
    assert (output_and_reason(call), transcript.pop_sent()) == ((IDS, FinishReason.STOP), [])


async def test_adopted_request_is_prompted_again_after_a_pause() -> None:
    transcript = SessionTranscript()
    _, name = transcript.open_request()
    here = sched.Placed(worker_id="h", worker_address=HERE)
    transcript.reopen_scheduler()
    transcript.send_event(name, placed=here)
    assert len(transcript.prompts) == 1
    transcript.send_tokens(name, 0, IDS[:2])
    transcript.send_event(name, preempted=sched.Preempted(output_tokens=2))
    transcript.send_event(name, placed=here)
    assert [list(prompt.token_ids) for _, prompt in transcript.prompts] == [
        [1, 2],
        [1, 2, *IDS[:2]],
    ]


async def test_paused_request_is_prompted_when_a_new_scheduler_places_it() -> None:
    transcript = SessionTranscript()
    _, name = transcript.open_request()
    transcript.send_event(name, preempted=sched.Preempted())
    transcript.reopen_scheduler()
    transcript.send_event(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    assert [prompt.request_id for _, prompt in transcript.prompts] == [name, name]


async def test_reopened_stream_before_the_scheduler_s_answer_resubmits() -> None:
    transcript = SessionTranscript()
    _, name = transcript.open_request()
    transcript.reopen_scheduler()
    transcript.reopen_worker(HERE)
    assert transcript.pop_sent() == [
        "request ~0 with 0", "request ~0 with 0 at h", "cancel CANCELLED at 0", "request ~1 with 0",
    ]  # fmt: skip
    transcript.send_event(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    assert len(transcript.prompts) == 1


async def test_prompt_is_scored_once_over_all_placements() -> None:
    """Scores received before the stream breaks are not requested again."""
    transcript = SessionTranscript()
    sampling = Sampling(seed=1, max_tokens=9, prompt_logprobs=0)
    client = ClientRequest(None)
    generation = GenerationRequest(client, (1, 2), sampling, Sla("standard"), time.monotonic())
    transcript.sessions.open([generation])
    name = transcript.to_scheduler[-1].request.request_id
    transcript.send_event(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    scores = [common.TokenLogprob(token_id=2, logprob=-1.0)]
    tokens = worker_pb2.RequestTokens(request_id=name, token_ids=[40], prompt_logprobs=scores)
    transcript.sessions.delivery.on_tokens(
        HERE, worker_pb2.TokenBatch(requests=[tokens]), time.monotonic()
    )
    transcript.reopen_worker(HERE)
    again = transcript.to_scheduler[-1].request.request_id
    transcript.send_event(again, placed=sched.Placed(worker_id="h", worker_address=HERE))
    sent = [prompt.sampling.HasField("prompt_logprobs") for _, prompt in transcript.prompts]
    assert sent == [True, False]
