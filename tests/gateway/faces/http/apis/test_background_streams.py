"""The events of background responses: followed, left, and read again from a number on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.faces.http.responses.event_log import EventLog, EventLogs, EventNews
from protos.generated import common_pb2 as common
from services.runtime.errors import InvalidArgument
from tests.gateway.faces.http.apis.test_responses import KEYS, WORDS, connect
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of
from tests.gateway.gateway_fixtures import first_prompt

STREAM: Any = {"input": "1,", "background": True, "stream": True}
STOP = common.FINISH_REASON_STOP


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """The test sends the tokens."""
    async with run_harness() as made:
        yield made


@pytest.fixture
async def client(harness: Harness) -> AsyncIterator[Any]:
    async with connect(harness) as made:
        yield made


async def begin(harness: Harness, client: Any) -> tuple[str, list[Any]]:
    """A response that a client leaves after its first text; its id and the events so far."""
    stream = await client.responses.create(**STREAM)
    events = [await anext(stream)]
    harness.worker.send(await first_prompt(harness), 0, tokens_of("one"))
    while events[-1].type != "response.output_text.delta":
        events.append(await anext(stream))
    await stream.close()
    return events[0].response.id, events


def finish(harness: Harness, text: str = " two") -> None:
    name = harness.worker.prompts[0].request_id
    harness.worker.send(name, 3, tokens_of(text), STOP)


async def read(client: Any, response_id: str, **query: Any) -> list[Any]:
    stream = await client.responses.retrieve(response_id, stream=True, **query)
    return [event async for event in stream]


async def test_response_goes_on_without_its_client_and_is_read_again(
    harness: Harness, client: Any
) -> None:
    response_id, before = await begin(harness, client)
    kinds = [event.type for event in before[:3]]
    assert kinds == ["response.created", "response.queued", "response.in_progress"]
    assert [event.response.status for event in before[:3]] == ["queued", "queued", "in_progress"]
    following = asyncio.ensure_future(
        read(client, response_id, starting_after=before[-1].sequence_number)
    )
    await harness.until(lambda: len(harness.front.background.names) == 1)
    assert not harness.scheduler.cancels
    finish(harness)
    after = await following
    assert [event.sequence_number for event in [*before, *after]] == [*range(len(before + after))]
    assert after[-1].response.output_text == "one two"
    assert (await client.responses.retrieve(response_id)).output_text == "one two"
    assert await read(client, response_id) == [*before, *after], "an ended one is read again"
    last = after[-1].sequence_number
    assert await read(client, response_id, starting_after=last) == []
    async with client.responses.stream(response_id=response_id, starting_after=last - 1) as stream:
        assert (await stream.get_final_response()).output_text == "one two"


async def test_ended_response_continues_before_its_last_event_is_sent(client: Any, harness: Any):
    harness.worker.script = lambda _: tokens_of(WORDS)
    stream = await client.responses.create(**STREAM)
    last = [event async for event in stream][-1]
    assert last.type == "response.completed"
    again = await client.responses.create(input="2,", previous_response_id=last.response.id)
    assert again.status == "completed"


@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_cancelled_response_ends_its_streams(harness: Harness, client: Any, end: str) -> None:
    response_id, _ = await begin(harness, client)
    following = asyncio.ensure_future(read(client, response_id))
    await asyncio.sleep(0)
    await getattr(client.responses, end)(response_id)
    if end == "cancel":
        last = (await following)[-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        assert (await read(client, response_id))[-1] == last
    else:
        with pytest.raises(openai.NotFoundError):
            await read(client, response_id)
        following.cancel()


async def test_failure_is_the_last_event(harness: Harness, client: Any) -> None:
    response_id, _ = await begin(harness, client)
    name = harness.worker.prompts[0].request_id
    harness.worker.send(name, 3, (), common.FINISH_REASON_ERROR, "out of luck")
    last = (await read(client, response_id))[-1]
    assert (last.type, last.response.error.message) == ("response.failed", "out of luck")
    assert (await client.responses.retrieve(response_id)).status == "failed"


async def test_events_beyond_the_limits_are_not_kept() -> None:
    async with run_harness(max_response_events=4) as harness, connect(harness) as client:
        response_id, before = await begin(harness, client)
        finish(harness)
        await harness.until(lambda: not harness.front.background.names)
        with pytest.raises(openai.BadRequestError, match="starting_after: the events up to"):
            await read(client, response_id)
        found = (await client.responses.retrieve(response_id)).output_text
        assert found == "one two"
        last = (await read(client, response_id, starting_after=before[-1].sequence_number + 2))[-1]
        assert last.response.output_text == "one two"


async def test_response_larger_than_the_log_is_followed_all_the_same() -> None:
    async with run_harness(max_response_event_bytes=100) as harness, connect(harness) as client:
        response_id, before = await begin(harness, client)
        assert [event.sequence_number for event in before] == [*range(len(before))]
        finish(harness)
        await harness.until(lambda: not harness.front.background.names)
        assert (await client.responses.retrieve(response_id)).output_text == "one two"


async def test_streams_that_cannot_be_read_say_why() -> None:
    async with (
        run_harness(api_keys=KEYS) as harness,
        connect(harness, KEYS[0]) as client,
        connect(harness, KEYS[1]) as stranger,
    ):
        response_id, _ = await begin(harness, client)
        with pytest.raises(openai.NotFoundError):
            await read(stranger, response_id)
        polled = await client.responses.create(input="1,", background=True)
        with pytest.raises(openai.BadRequestError, match="created with background and stream"):
            await read(client, polled.id)
        for query, fault in (
            ("stream=perhaps", "stream: must be true or false"),
            ("starting_after=3", "starting_after: needs stream=true"),
            ("stream=true&starting_after=-1", "must be the sequence_number"),
        ):
            path = f"/v1/responses/{response_id}?{query}"
            reply = await harness.http("GET", path, None, {"authorization": f"Bearer {KEYS[0]}"})
            assert reply.status == 400 and fault in reply.json["error"]["message"]


async def test_log_keeps_the_last_events_within_its_limits() -> None:
    log = EventLog(3, 10)
    log.add([b"a", b"b", b"c", b"d"])
    reading = log.read(0)
    assert await anext(reading) == b"bcd"
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    log.add([b"e" * 20])
    assert await waiting == b"e" * 20, "the last event is kept whatever its size"
    with pytest.raises(InvalidArgument, match="up to 0 are not kept"):
        log.check(-1)
    assert await anext(log.read(0)) == b"bcd" + b"e" * 20
    log.add([b"f"])
    log.end()
    with pytest.raises(InvalidArgument, match="up to 4 are not kept"):
        log.check(3)
    assert [data async for data in log.read(4)] == [b"f"]


def test_news_of_a_log_are_returned_once_unless_they_are_put_back() -> None:
    log = EventLog(2, 100)
    log.add([b"a", b"b"])
    assert log.pop_news() == EventNews(0, 0, (b"a", b"b"), False)
    assert log.pop_news() is None
    for event in (b"c", b"d", b"e", b"f"):
        log.add([event])
    log.end()
    last = EventNews(3, 3, (b"d", b"e", b"f"), True)
    assert log.pop_news() == last, "c is not kept"
    assert log.pop_news() is None
    log.put_back(last)
    assert log.pop_news() == last
    assert log.pop_news() is None


async def test_logs_of_ended_responses_make_room() -> None:
    logs = EventLogs(2, 10, 10)
    first, second = logs.open("a"), logs.open("b")
    second.end()
    third = logs.open("c")
    assert [logs.find(name) for name in "abc"] == [first, None, third]
