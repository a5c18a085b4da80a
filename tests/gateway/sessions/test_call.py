"""A call's chunks count as delivered when its writer requests the next one; its owner's events."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from gateway.sessions.call import ClientCall, LiveChoice
from gateway.sessions.session import Session
from gateway.types.client_request import ClientRequest
from gateway.types.generation import GenerationRequest, Sampling
from gateway.types.outcome import ChoiceOutcome
from services.core import FinishReason, Sla
from services.runtime.errors import Code, ServiceError
from services.sla import RequestTimeline
from tests.gateway.gateway_fakes import demo_text, tokens_of

STOP, CANCELLED, ERROR = FinishReason.STOP, FinishReason.CANCELLED, FinishReason.ERROR
PAUSE_S = 0.05


@dataclass
class RecordingOwner:
    """A call of two choices, and the events that its owner receives."""

    whole: bool = False
    call: ClientCall = field(init=False)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    completed: list[tuple[int, RequestTimeline, FinishReason]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call = ClientCall("c", 0, self, self.whole)
        generation = GenerationRequest(
            ClientRequest(None), (1, 2), Sampling(seed=1, max_tokens=100), Sla(), now_s()
        )
        for at in (0, 1):
            session = Session(
                at, generation.sampling, generation.arrival_s, demo_text().detokenizer()
            )
            self.call.choices.append(LiveChoice(session, generation, at, self.call))

    def message_interval_s(self) -> float:
        return 0.0

    def release(self, call: ClientCall, now_s: float) -> None:
        for live in call.choices:
            live.session.end(CANCELLED, now_s)

    def on_gap(self, gap_s: float, tokens: int) -> None:
        self.gaps.append((gap_s, tokens))

    def on_delivered(self, live: LiveChoice, outcome: ChoiceOutcome) -> None:
        assert live.outcome is outcome
        self.completed.append((live.session.index, outcome.timeline, outcome.reason))

    def feed(self, choice: int, text: str, reason: FinishReason | None = None) -> None:
        session = self.call.choices[choice].session
        session.feed(len(session.output), tokens_of(text), (), reason, now_s())
        self.call.notify(session, now_s())

    @property
    def ends(self) -> list[tuple[int, int, FinishReason]]:
        """(choice, delivered tokens, finish reason) of each completed choice."""
        return [(choice, timeline.tokens, reason) for choice, timeline, reason in self.completed]


def now_s() -> float:
    return time.monotonic()


async def test_tokens_count_as_delivered_when_the_writer_returns() -> None:
    owner = RecordingOwner()
    chunks = owner.call.chunks()
    owner.feed(0, "1")
    await anext(chunks)
    timeline = owner.call.choices[0].session.client_timeline.timeline
    assert timeline.tokens == 0  # the chunk is being written
    owner.feed(0, "2")
    owner.feed(0, "3", STOP)
    await asyncio.sleep(PAUSE_S)
    chunk = await anext(chunks)
    assert (chunk.text, timeline.tokens, timeline.ttft_s >= PAUSE_S) == ("23", 1, True)
    owner.feed(1, "4", STOP)
    await asyncio.sleep(PAUSE_S)
    await anext(chunks)
    assert owner.ends == [(0, 3, STOP)]
    [(gap_s, tokens)] = owner.gaps
    assert gap_s >= PAUSE_S and tokens == 2
    assert timeline.ended_s == timeline.last_token_s
    with pytest.raises(StopAsyncIteration):
        await anext(chunks)
    assert owner.ends == [(0, 3, STOP), (1, 1, STOP)]


async def test_disconnected_client_has_only_the_delivered_tokens() -> None:
    owner = RecordingOwner()
    chunks = owner.call.chunks()
    for text in "12":
        owner.feed(0, text)
        await anext(chunks)
    owner.feed(0, "3", STOP)
    owner.feed(1, "4")
    await chunks.aclose()
    owner.call.close()
    assert owner.ends == [(0, 1, CANCELLED), (1, 0, CANCELLED)]


async def test_unread_call_is_completed_by_its_end() -> None:
    owner = RecordingOwner()
    owner.feed(0, "1", STOP)
    owner.call.close()
    assert owner.ends == [(0, 0, CANCELLED), (1, 0, CANCELLED)]


@pytest.mark.parametrize(
    ("rejected", "reason", "expected"),
    [(False, ERROR, ERROR), (True, ERROR, ERROR), (False, FinishReason.DEADLINE, "deadline")],
)
async def test_broken_call_breaks_all_its_choices(
    rejected: bool, reason: FinishReason, expected: str
) -> None:
    owner = RecordingOwner()
    first = owner.call.choices[0].session
    first.timeline.rejected = rejected
    failure = ServiceError(Code.UNAVAILABLE, "gone") if reason is ERROR else None
    first.end(reason, now_s(), failure)
    owner.call.notify(first, now_s())
    with pytest.raises(ServiceError):
        await anext(owner.call.chunks())
    assert owner.ends == [(0, 0, expected), (1, 0, expected)]
    assert [timeline.rejected for _, timeline, _ in owner.completed] == [rejected] * 2


async def test_complete_answer_counts_tokens_on_arrival_and_its_end_when_sent() -> None:
    owner = RecordingOwner(whole=True)
    for choice in (0, 1):
        owner.feed(choice, "1")
    await asyncio.sleep(PAUSE_S)
    for choice in (0, 1):
        owner.feed(choice, "23", STOP)
    assert len([chunk async for chunk in owner.call.chunks()]) == 2
    assert (owner.completed, owner.gaps) == ([], [])
    await asyncio.sleep(PAUSE_S)
    owner.call.on_whole_sent()
    owner.call.close()
    assert owner.ends == [(0, 3, STOP), (1, 3, STOP)]
    for _, timeline, _ in owner.completed:
        assert (
            timeline.longest_gap_s >= PAUSE_S
            and timeline.ended_s - timeline.last_token_s >= PAUSE_S
        )
    late = RecordingOwner(whole=True)
    late.feed(0, "1", STOP)
    late.feed(1, "1", STOP)
    assert len([chunk async for chunk in late.call.chunks()]) == 2
    late.call.close()  # its client left before it was sent
    assert late.ends == [(0, 1, CANCELLED), (1, 1, CANCELLED)]
