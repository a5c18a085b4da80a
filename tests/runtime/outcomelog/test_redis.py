"""The outcome log as a stream of a real Redis: outages, timeouts, foreign entries, and hidden
passwords."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import pytest

from services.runtime.outcomelog import LogUnavailable, OutcomeLog, Row, open_log
from tests.reach import until
from tests.redis_server import PASSWORD, RedisServer, running_redis, url
from tests.runtime.outcomelog.outcome_rows import journaling, numbers, row, rows, warnings

STREAM = "foretoken:outcomes"


def kept(server: RedisServer) -> list[int]:
    found = cast(list[tuple[bytes, dict[bytes, bytes]]], server.client.xrange(STREAM))
    return [int(fields[b"payload"]) for _, fields in found]


@pytest.fixture
def server(redis_program: str, tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(redis_program, tmp_path) as server:
        yield server


@pytest.fixture(autouse=True)
def secret(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Asserts that no log record of a test contains the password."""
    caplog.set_level(logging.DEBUG)
    yield
    assert PASSWORD not in caplog.text


@asynccontextmanager
async def opened(port: int, rows_max: int = 1_000) -> AsyncIterator[OutcomeLog]:
    log = open_log(url(port), rows_max)
    try:
        yield log
    finally:
        await log.close()


# --- the log alone


async def test_redis_rows_are_read_in_order_from_any_position(server):
    async with opened(server.port) as log:
        assert await log.read("", 10) == []
        await log.append(rows(*range(12)))
        await log.append([Row("timing", 7, bytes(range(256)))])
        entries = await log.read("", 100)
        assert numbers(entries[:12]) == list(range(12))
        assert entries[12].row == Row("timing", 7, bytes(range(256)))
        positions = [entry.position for entry in entries]
        assert positions == sorted(set(positions))
        assert await log.read(positions[9], 2) == entries[10:12]
        assert await log.read(positions[-1], 2) == []


async def test_redis_stream_stays_near_the_bound(server):
    async with opened(server.port, 500) as log:
        for first in range(0, 5_000, 50):
            await log.append(rows(*range(first, first + 50)))
        left = numbers(await log.read("", 5_000))
    assert left == list(range(left[0], 5_000))
    assert 500 <= len(left) <= 700


async def test_two_logs_share_one_stream(server):
    async with opened(server.port) as one, opened(server.port) as other:
        await one.append(rows(0))
        await other.append(rows(1))
        await one.append(rows(2))
        assert numbers(await other.read("", 10)) == [0, 1, 2]


async def test_foreign_entries_are_skipped_and_logged_once(server, caplog):
    async with opened(server.port) as log:
        await log.append(rows(0))
        for _ in range(5):
            server.client.xadd(STREAM, {"hello": "world"})
        server.client.xadd(STREAM, {"kind": b"\xff", "version": "1", "payload": ""})
        server.client.xadd(STREAM, {"kind": "done", "version": "new", "payload": ""})
        await log.append(rows(1, 2))
        first = (await log.read("", 1))[0].position
        assert numbers(await log.read(first, 2)) == [1, 2]
        assert numbers(await log.read("", 10)) == [0, 1, 2]
    (message,) = warnings(caplog)
    assert f"{STREAM} on redis://127.0.0.1:{server.port}/0 contains entries that are not" in message


async def test_key_of_another_type_is_unavailable(server):
    server.client.set(STREAM, "a string")
    async with opened(server.port) as log:
        with pytest.raises(LogUnavailable, match=f"{STREAM} .*WRONGTYPE"):
            await log.read("", 1)


async def test_wrong_password_is_unavailable_and_not_shown(server):
    log = open_log(url(server.port).replace(PASSWORD, "another-secret"), 10)
    with pytest.raises(LogUnavailable, match=f"on redis://127.0.0.1:{server.port}/0 ") as refused:
        await log.append(rows(1))
    assert "another-secret" not in str(refused.value)
    await log.close()


async def test_cancelled_call_does_not_break_the_next(server):
    async def endless(log: OutcomeLog) -> None:
        while True:
            await log.read("", 10)

    async with opened(server.port) as log:
        await log.append(rows(0))
        for steps in range(300):
            task = asyncio.create_task(endless(log))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=10)
            assert done, f"cancelled after {steps} steps, it continued"
            assert task.cancelled()
        assert numbers(await log.read("", 10)) == [0]


async def test_redis_is_unavailable_until_it_returns(server):
    async with opened(server.port) as log:
        await log.append(rows(0))
        server.kill()
        with pytest.raises(LogUnavailable, match=f"127.0.0.1:{server.port}"):
            await log.read("", 10)
        with pytest.raises(LogUnavailable):
            await log.append(rows(1))
        server.start()
        await log.append(rows(1), again=True)
        assert numbers(await log.read("", 10)) == [0, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        f"redis://:{PASSWORD}/x@host:6379",
        f"redis://:{PASSWORD}@host:6379?unknown=1",
        f"redis://:{PASSWORD}@a..b:6379",
        f"redis://:{PASSWORD}@host:99999",
    ],
)
def test_invalid_url_is_an_error_without_quoting_it(wrong):
    with pytest.raises(ValueError, match=r"log\.path is not of the form") as refused:
        open_log(wrong, 10)
    assert PASSWORD not in str(refused.value)
    assert refused.value.__suppress_context__


# --- a connection that fails between an append and its answer


class FailingProxy:
    """A proxy in front of Redis. Instead of the next `cuts` answers to an append, it closes the
    connection. `silent`: it forwards nothing."""

    def __init__(self) -> None:
        self.cuts = 0
        self.silent = False
        self.port = 0

    @asynccontextmanager
    async def to(self, port: int) -> AsyncIterator["FailingProxy"]:
        async def carry(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
            far, out = await asyncio.open_connection("127.0.0.1", port)
            try:
                await self._carry(near, back, far, out)
            finally:
                out.close()
                back.close()

        listener = await asyncio.start_server(carry, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        async with listener:
            yield self

    async def _carry(
        self,
        near: asyncio.StreamReader,
        back: asyncio.StreamWriter,
        far: asyncio.StreamReader,
        out: asyncio.StreamWriter,
    ) -> None:
        while asked := await near.read(2**20):
            if self.silent:
                continue
            out.write(asked)
            answer = await far.read(2**20)
            if b"XADD" in asked and self.cuts:
                self.cuts -= 1
                return
            back.write(answer)


@pytest.mark.parametrize("cuts", [1, 2, 3, 6])
async def test_append_with_a_lost_answer_is_stored_once(server, cuts):
    async with FailingProxy().to(server.port) as line, opened(line.port) as log:
        await log.append(rows(0))
        line.cuts = cuts
        await _persist(log, rows(1, 2))
        await log.append(rows(3))
        assert line.cuts == 0
    assert kept(server) == [0, 1, 2, 3]


async def _persist(log: OutcomeLog, batch: list[Row]) -> None:
    again = False
    for _ in range(10):
        with suppress(LogUnavailable):
            return await log.append(batch, again)
        again = True
    raise AssertionError("the log stayed unavailable")


@pytest.mark.slow
async def test_silent_redis_is_unavailable(server):
    async with FailingProxy().to(server.port) as line, opened(line.port) as log:
        await log.append(rows(0))
        line.silent = True
        with pytest.raises(LogUnavailable, match=f"on redis://127.0.0.1:{line.port}/0"):
            await log.append(rows(1))
        line.silent = False
        await log.append(rows(1), again=True)
        assert numbers(await log.read("", 10)) == [0, 1]


@pytest.mark.slow
async def test_journal_over_a_bad_connection_delivers_once(server):
    got: list[Row] = []
    async with (
        FailingProxy().to(server.port) as line,
        journaling(open_log(url(line.port), 10_000), got) as journal,
    ):
        for first in range(0, 100, 25):
            line.cuts = 2  # the client itself retries once
            for number in range(first, first + 25):
                journal.put(row(number))
            await until(lambda: line.cuts == 0)
        await until(lambda: len(got) == 100)
        assert journal.written == 100
    assert numbers(got) == kept(server) == list(range(100))


# --- the journal


async def test_restarted_redis_loses_no_rows(server, caplog):
    """Rows before, during and after an outage are delivered once, in order, to both replicas."""
    got: list[Row] = []
    seen: list[Row] = []
    async with (
        journaling(open_log(url(server.port), 10_000), got) as journal,
        journaling(open_log(url(server.port), 10_000), seen) as replica,
    ):
        for number in range(300):
            if number == 100:
                server.kill()  # while rows are written
            if number == 200:
                await until(lambda: journal.unavailable and replica.unavailable)
                server.start()
            journal.put(row(number))
            await asyncio.sleep(0.001)
        await until(lambda: len(got) == 300 and len(seen) == 300)
        await until(lambda: not (journal.unavailable or replica.unavailable))
        assert (journal.written, journal.dropped) == (300, 0)
    assert numbers(got) == numbers(seen) == kept(server) == list(range(300))
    message = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.endswith("journal")]
    assert sorted(level for level, _ in message) == ["INFO", "INFO", "WARNING", "WARNING"]
    assert all(str(server.port) in text for level, text in message if level == "WARNING")


async def test_restarted_service_replays_the_stream(server):
    async with opened(server.port) as log:
        await log.append(rows(*range(1_000)))
    server.kill()
    server.start()
    got: list[Row] = []
    async with journaling(open_log(url(server.port), 1_000), got) as journal:
        await asyncio.wait_for(journal.replayed.wait(), 10)
        assert numbers(got) == list(range(1_000))


async def test_redis_journal_writes_queued_rows_on_stop(server):
    async with journaling(open_log(url(server.port), 5_000), [], poll_s=600.0) as journal:
        await asyncio.wait_for(journal.replayed.wait(), 10)
        for number in range(700):
            journal.put(row(number))
    assert kept(server) == list(range(700))


async def test_stop_without_redis_reports_lost_rows(server, caplog):
    async with journaling(open_log(url(server.port), 100), []) as journal:
        await asyncio.wait_for(journal.replayed.wait(), 10)
        server.kill()
        await until(lambda: journal.unavailable)
        for number in range(3):
            journal.put(row(number))
    assert (journal.dropped, journal.written) == (3, 0)
    assert warnings(caplog)[-1].startswith("stopping with 3 outcomes not written: ")
