"""Tokens that wait for a gateway that reads slowly, or not at all."""

import asyncio

from protos.generated import common_pb2
from services.core import FinishReason
from services.runtime.network.channel import MAX_MESSAGE_BYTES
from services.worker.outbox import MAX_BATCHES, TokenOutbox
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.scores import (
    SCORES_BYTES,
    Opening,
    PromptLogprobs,
    encoded_bytes,
)


async def test_unread_tokens_of_a_slow_gateway_are_one_message():
    outbox = TokenOutbox(limit_tokens=100)
    for offset in range(3):
        for request_id in ("a", "b"):
            finish = FinishReason.STOP if (request_id, offset) == ("b", 2) else None
            outbox.add(NewToken("g", request_id, offset, 10 + offset, finish, None))
    outbox.add_error("a", 3, "why")
    messages = aiter(outbox)
    batch = await anext(messages)
    assert [(m.request_id, m.offset, list(m.token_ids), m.finish_reason, m.message)
            for m in batch.requests] == [
        ("a", 0, [10, 11, 12], common_pb2.FINISH_REASON_ERROR, "why"),
        ("b", 0, [10, 11, 12], common_pb2.FINISH_REASON_STOP, ""),
    ]  # fmt: skip
    outbox.add(NewToken("g", "c", 7, 1, None, None))
    assert [m.request_id for m in (await anext(messages)).requests] == ["c"]


async def test_refusal_is_an_error_of_the_request():
    outbox = TokenOutbox(limit_tokens=100)
    outbox.add_refusal("a", 0, "too long")
    [message] = (await anext(aiter(outbox))).requests
    assert message.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert (message.refused, message.message) == (True, "too long")


async def test_returning_request_keeps_offsets_while_old_tokens_wait():
    outbox = TokenOutbox(limit_tokens=100)
    for offset, token in (
        (0, 10),
        (1, 11),
        (5, 15),
        (6, 16),
    ):  # cancelled at 2 tokens, resubmitted with 5
        outbox.add(NewToken("g", "a", offset, token, None, None))
    batch = await anext(aiter(outbox))
    reported = [(m.request_id, m.offset, list(m.token_ids)) for m in batch.requests]
    assert reported == [("a", 0, [10, 11]), ("a", 5, [15, 16])]


async def test_short_steps_share_a_message_except_beginnings_and_ends(monkeypatch):
    for name in ("PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"services.worker.outbox.{name}", 3_600.0)
    outbox = TokenOutbox(limit_tokens=100)
    messages = aiter(outbox)

    async def taken(*tokens: NewToken) -> list[tuple[str, int]]:
        for token in tokens:
            outbox.add(token)
        batch = await asyncio.wait_for(anext(messages), 10)
        return [(m.request_id, len(m.token_ids)) for m in batch.requests]

    assert await taken(NewToken("g", "a", 0, 5, None, None, Opening(0))) == [("a", 1)]
    reading = asyncio.ensure_future(taken(NewToken("g", "a", 1, 6, None, None)))
    await asyncio.sleep(0.02)
    assert not reading.done(), "the middle of an answer does not wait for more"
    outbox.add(NewToken("g", "a", 2, 7, None, None))
    outbox.add(NewToken("g", "b", 0, 5, None, None, Opening(0)))
    assert await reading == [("a", 2), ("b", 1)]
    ends = NewToken("g", "a", 3, 6, FinishReason.STOP, None), NewToken("g", "b", 1, 6, None, None)
    assert await taken(*ends) == [("a", 1), ("b", 1)]
    outbox.add(NewToken("g", "b", 2, 6, None, None))
    outbox.add_error("b", 3, "why")
    assert await taken() == [("b", 1)]
    outbox.add(NewToken("g", "c", 9, 6, None, None))
    outbox.close()
    assert await taken() == [("c", 1)]


async def test_middle_tokens_wait_at_most_the_pause():
    outbox = TokenOutbox(limit_tokens=100)
    messages = aiter(outbox)
    for offset in range(3):
        outbox.add(NewToken("g", "a", offset, 6, None, None))
        await asyncio.wait_for(anext(messages), 10)


async def test_gateway_that_does_not_read_is_disconnected():
    outbox = TokenOutbox(limit_tokens=5)
    for offset in range(50):
        outbox.add(NewToken("g", "a", offset, 1, None, None))
    batches = [batch async for batch in outbox]
    assert outbox.overflowed
    assert len(batches) == 1 and len(batches[0].requests[0].token_ids) == 6


def scored(tokens: int, k: int) -> PromptLogprobs:
    """Scores with the largest encoded size."""
    scores = PromptLogprobs.room(tokens, k)
    scores.ids[:], scores.top_ids[:] = 2_000_000, 2_000_000
    scores.chosen[:], scores.top[:] = -1.5, -2.5
    return scores


async def test_first_message_has_cached_tokens_and_prompt_scores():
    outbox = TokenOutbox(limit_tokens=100)
    outbox.add(NewToken("g", "a", 0, 5, None, None, Opening(3, scored(2, 1))))
    outbox.add(NewToken("g", "a", 1, 6, None, None))
    outbox.add(NewToken("g", "b", 0, 5, None, None, Opening(4)))
    a, b = (await anext(aiter(outbox))).requests
    one = common_pb2.TokenLogprob(
        token_id=2_000_000, logprob=-1.5, top_ids=[2_000_000], top_logprobs=[-2.5]
    )
    assert (list(a.token_ids), a.cached_tokens, list(a.prompt_logprobs)) == ([5, 6], 3, [one] * 2)
    assert (list(b.token_ids), b.cached_tokens, list(b.prompt_logprobs)) == ([5], 4, [])


async def test_scored_prompts_stay_within_the_message_limit():
    """Each has the largest size. Tokens after one are merged, and all arrive in order."""
    tokens = SCORES_BYTES // encoded_bytes(1, 20)
    outbox, opening = TokenOutbox(limit_tokens=100), Opening(0, scored(tokens, 20))
    for number in range(5):
        outbox.add(NewToken("g", f"r{number}", 0, 5, None, None, opening))
        outbox.add(NewToken("g", "x", number, 6, None, None))
        outbox.add(NewToken("g", f"r{number}", 1, 7, None, None))
    outbox.close()
    batches = [batch async for batch in outbox]
    assert len(batches) == 3 and not outbox.overflowed
    assert max(batch.ByteSize() for batch in batches) < 2 * SCORES_BYTES + 1_000 < MAX_MESSAGE_BYTES
    reported: dict[str, list[int]] = {}
    for request in (request for batch in batches for request in batch.requests):
        made = reported.setdefault(request.request_id, [])
        made += range(request.offset, request.offset + len(request.token_ids))
    assert reported == {"x": [*range(5)], **{f"r{number}": [0, 1] for number in range(5)}}


async def test_gateway_that_reads_no_scored_prompts_is_disconnected(monkeypatch):
    monkeypatch.setattr("services.worker.outbox.SCORES_BYTES", 100)
    outbox, opening = TokenOutbox(limit_tokens=1_000), Opening(0, scored(9, 0))
    for number in range(3 * MAX_BATCHES):
        outbox.add(NewToken("g", f"r{number}", 0, 5, None, None, opening))
    batches = [batch async for batch in outbox]
    assert outbox.overflowed and len(batches) == MAX_BATCHES
