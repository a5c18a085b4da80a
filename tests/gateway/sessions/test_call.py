"""A call's chunks count as delivered when its writer requests the next one; its owner's events."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from gateway.sessions.call import ClientCall, LiveChoice
from gateway.sessions.session import ChoiceChunk, Session
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


@dataclass
class RecordingSink:
    """Takes chunks while it is ready; raises once for `refused`."""

    ready: bool = True
    refused: str = ""
    texts: list[str] = field(default_factory=list)

    def write(self, chunk: ChoiceChunk) -> None:
        if chunk.text == self.refused:
            raise ValueError("cannot write")
        self.texts.append(chunk.text)


async def waiting_writer(owner: RecordingOwner) -> "asyncio.Future[ChoiceChunk]":
    """A writer that has sent the first chunk and waits for news."""
    chunks = owner.call.chunks()
    owner.feed(0, "1")
    assert (await anext(chunks)).text == "1"
    following = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    return following


async def test_sink_takes_news_at_once_and_the_writer_sends_the_end() -> None:
    owner = RecordingOwner()
    owner.call.sink = sink = RecordingSink()
    following = await waiting_writer(owner)
    owner.feed(0, "2")
    owner.feed(0, "34")
    assert sink.texts == ["2", "34"]  # before the writer had a turn
    timeline = owner.call.choices[0].session.client_timeline.timeline
    assert (timeline.tokens, [tokens for _, tokens in owner.gaps]) == (4, [1, 2])
    assert not following.done()
    owner.feed(0, "5", STOP)
    assert sink.texts == ["2", "34"]
    assert ((await following).text, (await following).reason) == ("5", STOP)


async def test_writer_sends_what_a_sink_that_is_not_ready_leaves() -> None:
    owner = RecordingOwner()
    owner.call.sink = sink = RecordingSink()
    following = await waiting_writer(owner)
    sink.ready = False
    owner.feed(0, "2")
    sink.ready = True
    owner.feed(0, "3")  # the writer has been woken for the tokens before
    assert ((await following).text, sink.texts) == ("23", [])


async def test_first_tokens_of_each_choice_go_through_the_writer() -> None:
    owner = RecordingOwner()
    owner.call.sink = sink = RecordingSink()
    following = await waiting_writer(owner)
    owner.feed(1, "a")
    assert ((await following).index, (await following).text, sink.texts) == (1, "a", [])


async def test_failing_sink_breaks_its_call_alone() -> None:
    owner = RecordingOwner()
    owner.call.sink = RecordingSink(refused="2")
    following = await waiting_writer(owner)
    owner.feed(0, "2")  # raises nothing here, where other calls' tokens follow
    with pytest.raises(ValueError, match="cannot write"):
        await following
    assert owner.ends == [(0, 1, CANCELLED), (1, 0, CANCELLED)]
