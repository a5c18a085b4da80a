"""Sessions: fed tokens, their result, and the chunks for the client."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.call import ClientCall, LiveChoice
from gateway.sessions.session import FeedResult, Session
from gateway.types.client_request import ClientRequest
from gateway.types.generation import GenerationRequest, Sampling
from gateway.types.outcome import ChoiceOutcome
from protos.generated.common_pb2 import TokenLogprob
from services.core import FinishReason, Sla
from tests.gateway.gateway_fakes import demo_text, tokens_of


def session(max_tokens: int = 100, stops: Sequence[str] = (), min_tokens: int = 0) -> Session:
    sampling = Sampling(1, max_tokens, stop=tuple(stops), min_tokens=min_tokens)
    return Session(0, sampling, 0.0, demo_text().detokenizer())


class IgnoringOwner:
    """An owner without a message interval that ignores all events."""

    def message_interval_s(self) -> float:
        return 0.0

    def release(self, call: ClientCall, now_s: float) -> None: ...

    def on_gap(self, gap_s: float, tokens: int) -> None: ...

    def on_delivered(self, live: LiveChoice, outcome: ChoiceOutcome) -> None: ...


def read(live: Session) -> str:
    chunk = live.pop_chunk()
    return chunk.text if chunk else ""


def test_session_ignores_repeats_and_reports_gaps() -> None:
    live = session()
    a, b, c, d = ids = tokens_of("1234")
    assert live.feed(0, [a, b], (), None, 1.0) is FeedResult.TOKENS
    assert live.feed(0, [a, b], (), None, 2.0) is FeedResult.NONE
    assert live.feed(1, [b, c], (), None, 3.0) is FeedResult.TOKENS
    assert live.feed(4, [d], (), None, 4.0) is FeedResult.GAP
    assert live.feed(3, [d], (), FinishReason.STOP, 5.0) is FeedResult.END
    assert live.feed(4, [d], (), None, 6.0) is FeedResult.NONE
    chunk = live.pop_chunk()
    assert chunk is not None
    assert (chunk.text, list(chunk.token_ids), chunk.reason) == ("1234", ids, FinishReason.STOP)


def test_session_sends_its_end_once() -> None:
    """A notification may arrive after the writer has sent the end."""
    live = session()
    live.feed(0, tokens_of("12"), (), FinishReason.STOP, 1.0)
    assert live.pop_chunk() is not None
    assert live.pop_chunk() is None


async def test_choice_that_ends_while_another_is_sent_ends_alone() -> None:
    """Both choices have news; the second one ends before its chunk is sent and has news twice."""
    call = ClientCall("c", 0, IgnoringOwner())
    a, b = (Session(at, Sampling(1, 100), 0.0, demo_text().detokenizer()) for at in (0, 1))
    generation = GenerationRequest(
        ClientRequest(None), (1, 2), Sampling(seed=1, max_tokens=100), Sla(), 0.0
    )
    call.choices += [LiveChoice(each, generation, at, call) for at, each in enumerate((a, b))]

    def feed(live: Session, offset: int, text: str, reason: FinishReason | None = None) -> None:
        live.feed(offset, tokens_of(text), (), reason, 1.0)
        call.notify(live, 1.0)

    feed(a, 0, "1")
    feed(b, 0, "2")
    chunks = call.chunks()
    got = [await anext(chunks)]
    feed(b, 1, "3", FinishReason.STOP)
    got.append(await anext(chunks))
    feed(a, 1, "4", FinishReason.STOP)
    async with asyncio.timeout(10):
        got += [chunk async for chunk in chunks]
    assert [(chunk.index, chunk.text, chunk.reason) for chunk in got] == [
        (0, "1", None), (1, "23", FinishReason.STOP), (0, "4", FinishReason.STOP),
    ]  # fmt: skip


def test_logprobs_follow_their_tokens_through_repeats() -> None:
    live = session()
    ids = tokens_of("123")
    logprobs = [TokenLogprob(token_id=i, logprob=-at) for at, i in enumerate(ids)]
    live.feed(0, ids[:2], logprobs[:2], None, 1.0)
    live.feed(0, ids, logprobs, FinishReason.LENGTH, 2.0)
    chunk = live.pop_chunk()
    assert chunk is not None
    assert [p.token_id for p in chunk.logprobs] == ids


def test_session_drops_tokens_beyond_max_tokens() -> None:
    live = session(max_tokens=2)
    live.feed(0, tokens_of("12345"), (), FinishReason.LENGTH, 1.0)
    assert read(live) == "12"


def test_stale_end_of_an_earlier_placement_is_ignored() -> None:
    live = session()
    live.feed(0, tokens_of("1234"), (), None, 1.0)
    assert live.feed(1, tokens_of("2"), (), FinishReason.LENGTH, 2.0) is FeedResult.NONE
    assert not live.over


def test_stop_string_ends_at_the_completing_token() -> None:
    live = session(stops=["34"])
    ids = tokens_of("123456")
    assert live.feed(0, ids, (), None, 1.0) is FeedResult.END
    assert live.stopped_by_text
    assert live.output == ids[:4]
    assert read(live) == "12"


def test_stop_string_is_ignored_before_min_tokens() -> None:
    live = session(stops=["2"], min_tokens=4)
    assert live.feed(0, tokens_of("1212"), (), None, 1.0) is FeedResult.TOKENS
    assert live.feed(4, tokens_of("12"), (), None, 2.0) is FeedResult.END
    assert read(live) == "12121"


def test_withheld_text_is_sent_at_the_end() -> None:
    live = session(stops=["345"])
    live.feed(0, tokens_of("1234"), (), None, 1.0)
    assert read(live) == "12"
    live.feed(4, (), (), FinishReason.LENGTH, 2.0)
    assert read(live) == "34"


@given(
    st.text(max_size=20),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6), st.booleans()), max_size=40),
    st.sampled_from([(), ("zz",)]),
)
def test_overlapping_deliveries_make_one_answer(
    text: str, deliveries: list[tuple[int, int, bool]], stops: tuple[str, ...]
) -> None:
    """Tokens in any pieces, repeated or at a wrong offset; at the end all of them again."""
    ids = tokens_of(text)
    live, got = session(1000, stops), ""
    sent: list[int] = []
    for offset, count, take in [*deliveries, (0, len(ids), True)]:
        before = len(live.output)
        news = live.feed(offset, ids[offset : offset + count], (), None, 1.0)
        assert (news is FeedResult.GAP) == (offset > before)
        chunk = live.pop_chunk() if take else None
        if chunk:
            got += chunk.text
            sent += chunk.token_ids
    live.feed(len(ids), (), (), FinishReason.STOP, 2.0)
    if "zz" in text and stops:
        assert got + read(live) == text[: text.index("zz")]
        return
    last = live.pop_chunk()
    assert last is not None
    assert (got + last.text, [*sent, *last.token_ids]) == (text, ids)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_finish_reason_ends_the_session(reason: FinishReason) -> None:
    live = session()
    live.feed(0, tokens_of("1"), (), None, 1.0)
    live.end(reason, 2.0)
    live.end(FinishReason.ERROR, 3.0, RuntimeError())
    assert (live.reason, live.failure, live.timeline.ended_s) == (reason, None, 2.0)


END, USER = (demo_text().encode(f"<|{name}|>")[0] for name in ("end", "user"))


@given(
    st.lists(st.sampled_from([*tokens_of("ab1é"), END, USER]), max_size=24),
    st.lists(st.tuples(st.integers(0, 24), st.integers(0, 6), st.booleans()), max_size=24),
    st.sampled_from([(), ("b1",), ("ab", "b1a")]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
def test_chunks_join_to_the_whole_text(
    ids: list[int], deliveries: list[tuple[int, int, bool]], stops: tuple[str, ...],
    skips: bool, includes: bool, reason: FinishReason,
) -> None:  # fmt: skip
    """With and without skipped special tokens and included stops. The reference decodes all tokens
    at once and searches stop strings character by character."""
    sampling = Sampling(
        1, 1000, skip_special_tokens=skips, include_stop_str_in_output=includes,
        stop=stops, stop_token_ids=frozenset((USER,)),
    )  # fmt: skip
    live = Session(0, sampling, 0.0, demo_text().detokenizer(sampling))
    got = ""
    for offset, count, take in [*deliveries, (0, len(ids), True)]:
        live.feed(offset, ids[offset : offset + count], (), None, 1.0)
        got += read(live) if take else ""
    live.feed(len(ids), (), (), reason, 2.0)
    silent = ids and ids[-1] in (END, USER) and reason is FinishReason.STOP and not includes
    whole = demo_text().decode(ids[:-1] if silent else ids, skips)
    for end in range(1, len(whole) + 1):
        done = [stop for stop in stops if whole[:end].endswith(stop)]
        if done:
            whole = whole[: end if includes else end - len(max(done, key=len))]
            break
    assert got + read(live) == whole


def test_prompt_info_comes_with_the_first_tokens_only() -> None:
    live = session()
    ids = tokens_of("12")
    scores = [TokenLogprob(token_id=7, logprob=-1.0)]
    live.add_prompt_info(3, scores)
    live.add_prompt_info(0, ())
    live.feed(0, ids[:1], (), None, 1.0)
    first = live.pop_chunk()
    live.feed(1, ids[1:], (), FinishReason.STOP, 2.0)
    second = live.pop_chunk()
    assert first and second
    assert (list(first.prompt_logprobs), list(second.prompt_logprobs)) == (scores, [])
    assert live.cached_tokens == 3
    bare = second.without_output
    assert (bare.text, bare.token_ids, bare.reason) == ("", (), FinishReason.LENGTH)
