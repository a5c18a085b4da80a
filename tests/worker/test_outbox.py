"""What waits for a gateway that reads slowly, or not at all."""

from protos import common_pb2
from services.core import FinishReason
from services.worker.outbox import TokenOutbox
from services.worker.requests.batch import NewToken


async def test_what_a_slow_gateway_has_not_read_is_one_message():
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


async def test_a_request_that_comes_again_while_its_old_tokens_wait_keeps_its_offsets():
    outbox = TokenOutbox(limit_tokens=100)
    for offset, token in ((0, 10), (1, 11), (5, 15), (6, 16)):  # cancelled at 2, prompted with 5
        outbox.add(NewToken("g", "a", offset, token, None, None))
    batch = await anext(aiter(outbox))
    told = [(m.request_id, m.offset, list(m.token_ids)) for m in batch.requests]
    assert told == [("a", 0, [10, 11]), ("a", 5, [15, 16])]


async def test_a_gateway_that_does_not_read_is_cut_off():
    outbox = TokenOutbox(limit_tokens=5)
    for offset in range(50):
        outbox.add(NewToken("g", "a", offset, 1, None, None))
    batches = [batch async for batch in outbox]
    assert outbox.overflowed
    assert len(batches) == 1 and len(batches[0].requests[0].token_ids) == 6
