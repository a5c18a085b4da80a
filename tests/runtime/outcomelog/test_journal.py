"""The journal over an SQLite file and over memory."""

import asyncio
import errno
import logging
import os
import sqlite3
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.runtime.outcomelog import Journal, Row, open_log
from services.runtime.outcomelog.journal import BATCH_ROWS, PAYLOAD_BYTES_MAX
from tests.reach import until
from tests.runtime.outcomelog.outcome_rows import (
    journaling,
    kept,
    numbers,
    opened,
    row,
    rows,
    warnings,
)


async def test_journal_replays_then_follows(tmp_path):
    async with opened(tmp_path / "log") as log:
        await log.append(rows(0, 1, 2))
    got: list[Row] = []
    async with journaling(open_log(str(tmp_path / "log"), 100), got) as journal:
        await asyncio.wait_for(journal.replayed.wait(), 10)
        assert numbers(got) == [0, 1, 2]
        journal.put(row(3))
        await until(lambda: len(got) == 4)
        assert numbers(got) == [0, 1, 2, 3]
        await until(lambda: journal.delivered == 4)
        assert (journal.written, journal.dropped, journal.pending) == (1, 0, 0)


async def test_journal_replays_a_long_log_page_by_page(tmp_path):
    async with opened(tmp_path / "log", 5_000) as log:
        await log.append(rows(*range(2_000)))
    got: list[Row] = []
    async with journaling(open_log(str(tmp_path / "log"), 5_000), got) as journal:
        await asyncio.wait_for(journal.replayed.wait(), 10)
        assert numbers(got) == list(range(2_000))


async def test_journal_writes_queued_rows_on_stop(tmp_path):
    count = 3 * BATCH_ROWS
    async with journaling(open_log(str(tmp_path / "log"), 5_000), [], poll_s=600.0) as journal:
        await asyncio.wait_for(journal.replayed.wait(), 10)
        for number in range(count):
            journal.put(row(number))
    assert (journal.written, journal.pending) == (count, 0)
    assert await kept(tmp_path / "log") == list(range(count))


@pytest.mark.slow
async def test_stop_with_a_locked_file_reports_lost_rows(tmp_path, caplog):
    path = tmp_path / "log"
    async with journaling(open_log(str(path), 100), [], flush_s=0.1) as journal:
        await asyncio.wait_for(journal.replayed.wait(), 10)
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        journal.put(row(1))
        await asyncio.sleep(0.05)
    blocker.close()
    assert journal.dropped == 1
    assert warnings(caplog) == ["stopping with 1 outcomes not written: not done after 0.1 s"]


async def test_newer_versions_are_counted_and_logged_once(caplog):
    log = open_log("", 100)
    await log.append([row(0), row(1, version=3), row(2, version=2), row(3, version=4)])
    await log.append([row(4, "another service's", 9)])
    got: list[Row] = []
    async with journaling(log, got, version_max=2) as journal:
        await asyncio.wait_for(journal.replayed.wait(), 10)
        assert numbers(got) == [0, 2]
        assert (journal.delivered, journal.from_future) == (2, 2)
    (message,) = warnings(caplog)
    assert (
        "written by a newer foretoken (done version 3; this one reads up to version 2)" in message
    )


async def test_full_queue_drops_the_oldest_row():
    log = open_log("", 100)
    journal = Journal(log, lambda _: None, {}, queue_max=5)
    for number in range(8):
        journal.put(row(number))
    assert (journal.pending, journal.dropped) == (5, 3)
    task = asyncio.create_task(journal.run())
    await until(lambda: journal.written == 5)
    assert numbers(await log.read("", 10)) == [3, 4, 5, 6, 7]
    task.cancel()
    await asyncio.wait({task})


INVALID = [
    Row("done", 1, bytes(PAYLOAD_BYTES_MAX + 1)),
    Row("", 1, b""),
    Row("\ud800", 1, b""),
    Row("done", 2**70, b""),
    Row("done", -1, b""),
]


async def test_invalid_row_is_dropped_alone(tmp_path, caplog):
    got: list[Row] = []
    async with journaling(open_log(str(tmp_path / "log"), 100), got) as journal:
        for invalid in INVALID:
            journal.put(invalid)
        journal.put(row(1))
        await until(lambda: bool(got))
    assert numbers(got) == [1]
    assert journal.dropped == len(INVALID)
    assert len(warnings(caplog)) == 1


async def test_failing_receiver_does_not_end_the_service(caplog):
    got: list[Row] = []

    def receive(found: list[Row]) -> None:
        if b"0" in [each.payload for each in found]:
            raise ValueError("unknown payload")
        got.extend(found)

    log = open_log("", 100)
    await log.append(rows(0))
    journal = Journal(log, receive, {"done": 1}, poll_s=0.01)
    task = asyncio.create_task(journal.run())
    await until(lambda: journal.undeliverable == 1)
    journal.put(row(1))
    await until(lambda: bool(got))
    assert numbers(got) == [1]
    assert len(warnings(caplog)) == 1
    task.cancel()
    await asyncio.wait({task})


async def test_rows_wait_while_the_log_is_unavailable(tmp_path, caplog):
    """The log's directory is replaced by a file for a while, so that no process can use the log."""
    caplog.set_level(logging.INFO)
    home, path = tmp_path / "home", tmp_path / "home" / "log"
    got: list[Row] = []
    async with journaling(open_log(str(path), 100), got, queue_max=4) as journal:
        journal.put(row(0))
        await until(lambda: len(got) == 1)
        home.rename(tmp_path / "hidden")
        home.write_text("in the way")
        await until(lambda: journal.unavailable)
        for number in range(1, 8):
            journal.put(row(number))
        assert journal.dropped == 3
        home.unlink()
        (tmp_path / "hidden").rename(home)
        await until(lambda: len(got) == 5)
        assert numbers(got) == [0, 4, 5, 6, 7]
        await until(lambda: not journal.unavailable)
    message = [r.getMessage() for r in caplog.records if r.name.endswith("journal")]
    assert len(message) == 2
    assert os.strerror(errno.ENOTDIR) in message[0] or os.strerror(errno.EEXIST) in message[0]
    assert message[1] == "the outcome log is available again; 3 outcomes were dropped"


bursts = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 2 * BATCH_ROWS), st.booleans()), max_size=8
)


@pytest.mark.parametrize("where", ["", "log"], ids=["memory", "sqlite"])
@settings(max_examples=20, deadline=None)
@given(bursts=bursts)
def test_every_journal_receives_every_row_once_in_one_order(where, bursts):
    """Both journals deliver all rows of both in the same order, and each one's in its own order."""
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_two_journals(where and str(Path(directory, where)), bursts))


async def _two_journals(where: str, bursts: list[tuple[str, int, bool]]) -> None:
    logs = [open_log(where, 10_000) for _ in "ab"] if where else [open_log("", 10_000)] * 2
    put: dict[str, list[Row]] = {"a": [], "b": []}
    got: dict[str, list[Row]] = {"a": [], "b": []}
    async with journaling(logs[0], got["a"]) as a, journaling(logs[1], got["b"]) as b:
        for name, count, pause in bursts:
            burst = [Row("done", 1, f"{name}{len(put[name]) + i}".encode()) for i in range(count)]
            for each in burst:
                {"a": a, "b": b}[name].put(each)
            put[name] += burst
            await asyncio.sleep(0.002 * pause)
        total = len(put["a"]) + len(put["b"])
        await until(lambda: min(len(got["a"]), len(got["b"])) >= total)
    assert got["a"] == got["b"]
    for name in "ab":
        assert [r for r in got["a"] if r.payload.startswith(name.encode())] == put[name]
