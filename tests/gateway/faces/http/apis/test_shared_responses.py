"""Background responses of another gateway process that shares the store: followed and ended."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.faces.http.responses.event_copies import EventCopies
from gateway.faces.http.responses.event_log import EventNews
from services.runtime.errors import InvalidArgument, ServiceError
from tests.gateway.faces.http.apis.test_background_streams import begin, finish, read
from tests.gateway.faces.http.apis.test_responses import KEYS, connect
from tests.gateway.gateway_fakes import Harness, run_harness


@asynccontextmanager
async def two_processes(folder: Path, **config: Any) -> AsyncIterator[tuple[Harness, Any, Any]]:
    """The gateway that runs responses, its client, and the client of the other gateway; both
    clients have the same key."""
    shared: Any = {"responses_file": str(folder / "responses.db"), "api_keys": KEYS, **config}
    async with (
        run_harness(gateway_id="g0", **shared) as harness,
        run_harness(gateway_id="g1", **shared) as other,
        connect(harness, KEYS[0]) as client,
        connect(other, KEYS[0]) as elsewhere,
    ):
        yield harness, client, elsewhere


async def test_other_process_follows_a_response_and_reads_it_again(tmp_path: Path) -> None:
    async with two_processes(tmp_path) as (harness, client, elsewhere):
        response_id, before = await begin(harness, client)
        last = before[-1].sequence_number
        following = asyncio.ensure_future(read(elsewhere, response_id))
        behind = asyncio.ensure_future(read(elsewhere, response_id, starting_after=last))
        assert (await elsewhere.responses.retrieve(response_id)).status == "in_progress"
        finish(harness)
        whole = await following
        assert whole == await read(client, response_id)
        assert whole[-1].response.output_text == "one two"
        assert await behind == whole[last + 1 :]
        assert await read(elsewhere, response_id) == whole, "an ended one is read again"
        end = whole[-1].sequence_number
        assert await read(elsewhere, response_id, starting_after=end) == []


@pytest.mark.parametrize("end", ["cancel", "delete"])
async def test_other_process_ends_a_response(tmp_path: Path, end: str) -> None:
    async with two_processes(tmp_path) as (harness, client, elsewhere):
        response_id, _ = await begin(harness, client)
        following = asyncio.ensure_future(read(client, response_id))
        ended = await getattr(elsewhere.responses, end)(response_id)
        await harness.until(lambda: bool(harness.scheduler.cancels))
        last = (await following)[-1]
        assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
        if end == "cancel":
            assert ended.status == "cancelled"
            assert (await read(elsewhere, response_id))[-1] == last
        else:
            with pytest.raises(openai.NotFoundError):
                await read(elsewhere, response_id)


async def test_other_process_has_the_same_limits_and_keys(tmp_path: Path) -> None:
    async with two_processes(tmp_path, max_response_events=4) as (harness, client, elsewhere):
        response_id, before = await begin(harness, client)
        finish(harness)
        kept = before[-1].sequence_number + 2
        whole = await read(client, response_id, starting_after=kept)
        assert await read(elsewhere, response_id, starting_after=kept) == whole
        with pytest.raises(openai.BadRequestError, match="starting_after: the events up to"):
            await read(elsewhere, response_id)
        with pytest.raises(openai.NotFoundError):
            await read(elsewhere.with_options(api_key=KEYS[1]), response_id)
        polled = await client.responses.create(input="1,", background=True)
        with pytest.raises(openai.BadRequestError, match="created with background and stream"):
            await read(elsewhere, polled.id)


async def test_copies_are_dropped_with_their_logs_or_responses_and_after_a_restart(
    tmp_path: Path,
) -> None:
    file = str(tmp_path / "responses.db")
    first, second = EventCopies(file, "g0"), EventCopies(file, "g1")
    first.write({name: EventNews(0, 0, (b"1", b"2"), False) for name in "ab"}, {"a", "b"})
    first.write({"b": EventNews(1, 2, (b"3",), True)}, {"b"})
    assert second.follow("a", None) is None
    whole, rest = second.follow("b", None), second.follow("b", 1)
    assert whole and rest
    assert [data async for data in whole] == [b"23"]
    assert [data async for data in rest] == [b"3"]
    with pytest.raises(InvalidArgument, match="up to 0 are not kept"):
        second.follow("b", -1)
    first.write({"c": EventNews(0, 0, (b"1",), False)}, {"b", "c"})
    following = second.follow("c", None)
    assert following and await anext(following) == b"1"
    first.write({"c": EventNews(3, 3, (b"4",), False)}, {"b", "c"})
    with pytest.raises(InvalidArgument, match="up to 2 are not kept"):
        await anext(following)
    following = second.follow("c", 2)
    assert following and await anext(following) == b"4"
    second.drop("b")
    assert first.follow("b", None) is None
    EventCopies(file, "g0")
    with pytest.raises(ServiceError, match="has restarted"):
        await anext(following)
