"""The outcome log in a real SQLite file and in memory."""

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.runtime.outcomelog import LogUnavailable, OutcomeLog, Row, open_log
from services.runtime.outcomelog.logfile import LogFile
from tests.runtime.outcomelog.outcome_rows import kept, numbers, opened, row, rows, warnings

ROOT = Path(__file__).parents[3]
GARBAGE = b"this is no database, whatever its name says\n" * 400


def elsewhere(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A separate Python process, like another service."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def scribble(path: Path, at: int, length: int) -> None:
    """Writes garbage over part of a file, in another process: closing a file that SQLite has open
    would release SQLite's locks."""
    script = (
        "import sys, os\n"
        "with open(sys.argv[1], 'r+b') as file:\n"
        "    file.seek(int(sys.argv[2])); file.write(os.urandom(int(sys.argv[3])))"
    )
    assert elsewhere(script, path, at, length).wait(60) == 0


# --- the log alone


@pytest.fixture(params=["memory", "sqlite"])
async def log(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OutcomeLog]:
    async with opened(str(tmp_path / "log") if request.param == "sqlite" else "", 32) as log:
        yield log


async def test_appended_rows_are_read_in_order_from_any_position(log):
    await log.append(rows(0, 1, 2))
    await log.append(rows(3, 4))
    entries = await log.read("", 100)
    assert numbers(entries) == [0, 1, 2, 3, 4]
    positions = [entry.position for entry in entries]
    assert positions == sorted(set(positions))
    assert await log.read(positions[1], 2) == entries[2:4]
    assert await log.read(positions[-1], 2) == []


async def test_empty_log_has_no_entries(log):
    assert await log.read("", 10) == []


async def test_row_is_read_as_written(log):
    odd = Row("timing", 7, bytes(range(256)))
    await log.append([odd, Row("done", 0, b"")])
    assert [entry.row for entry in await log.read("", 10)] == [odd, Row("done", 0, b"")]


async def test_full_log_drops_the_oldest_and_keeps_positions_valid(log):
    await log.append(rows(0))
    (first,) = await log.read("", 1)
    for number in range(1, 100):
        await log.append(rows(number))
    assert numbers(await log.read("", 1_000)) == list(range(68, 100))
    assert numbers(await log.read(first.position, 3)) == [68, 69, 70]


async def test_append_above_the_bound_keeps_the_newest(log):
    await log.append(rows(*range(100)))
    assert numbers(await log.read("", 1_000)) == list(range(68, 100))


async def test_repeated_append_is_stored_once(log):
    await log.append(rows(0, 1))
    await log.append(rows(0, 1), again=True)
    await log.append(rows(2))
    assert numbers(await log.read("", 10)) == [0, 1, 2]


# --- the file


async def test_file_survives_a_restart(tmp_path):
    path = tmp_path / "deep" / "down" / "log"
    async with opened(path) as log:
        await log.append([row(1), row(2, "timing", 9)])
        before = await log.read("", 10)
    async with opened(path) as log:
        assert await log.read("", 10) == before
        await log.append(rows(3))
        assert numbers(await log.read(before[-1].position, 10)) == [3]


async def test_file_size_stays_near_the_bound(tmp_path):
    async with opened(tmp_path / "log", 160) as log:
        for number in range(1_000):
            await log.append(rows(number))
    with sqlite3.connect(tmp_path / "log") as file:
        assert 160 <= file.execute("SELECT count(*) FROM outcomes").fetchone()[0] <= 170
    file.close()


async def test_cancelled_append_can_be_repeated(tmp_path):
    async with opened(tmp_path / "log") as log:
        first = asyncio.create_task(log.append(rows(1, 2)))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        await log.append(rows(1, 2), again=True)
        assert numbers(await log.read("", 10)) == [1, 2]


async def make_log(path: Path, count: int = 2_000) -> None:
    """A file of 6 MB without a WAL, larger than SQLite's cache."""
    async with opened(path, 10_000) as log:
        await log.append([Row("done", 1, str(n).zfill(3_000).encode()) for n in range(count)])


def garbage(path: Path) -> None:
    path.write_bytes(GARBAGE)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def bad_pages(path: Path) -> None:
    scribble(path, 8 * 4096, 4 * 4096)


def no_table(path: Path) -> None:
    with sqlite3.connect(path) as file:
        file.execute("ALTER TABLE outcomes RENAME TO something")
    file.close()


@pytest.mark.parametrize("damage", [garbage, cut, bad_pages, no_table])
async def test_corrupt_file_is_moved_aside(tmp_path, caplog, damage):
    path = tmp_path / "log"
    await make_log(path)
    damage(path)
    damaged = path.read_bytes()
    async with opened(path) as log:
        assert await log.read("", 10) == []
        await log.append(rows(1))
        assert numbers(await log.read("", 10)) == [1]
    aside = tmp_path / "log.corrupt-1"
    assert aside.read_bytes() == damaged
    (sentence,) = warnings(caplog)
    assert str(path) in sentence
    assert str(aside) in sentence


async def test_corrupt_files_have_distinct_names_up_to_a_bound(tmp_path):
    path = tmp_path / "log"
    for number in range(10):
        path.write_bytes(GARBAGE + bytes([number]))
        async with opened(path):
            pass
        path.unlink()
    names = {f"log.corrupt-{n}" for n in range(1, 9)}
    assert {each.name for each in tmp_path.iterdir()} == names | {"log.lock"}
    assert (tmp_path / "log.corrupt-2").read_bytes()[-1] == 9  # the oldest made room


async def test_later_corruption_is_moved_aside_and_the_append_is_kept(tmp_path, caplog):
    path = tmp_path / "log"
    await make_log(path)
    async with opened(path) as log:
        assert len(await log.read("", 1_000)) == 1_000  # evicts the last pages from the cache
        scribble(path, 0, path.stat().st_size)
        await log.append(rows(1, 2))
        assert numbers(await log.read("", 10)) == [1, 2]
    assert len(warnings(caplog)) == 1
    assert (tmp_path / "log.corrupt-1").exists()


async def test_follower_continues_after_the_file_is_recreated(tmp_path, caplog):
    path = tmp_path / "log"
    await make_log(path)
    async with opened(path) as log, opened(path) as other:
        position = (await log.read("", 10))[-1].position
        scribble(path, 4096, path.stat().st_size - 4096)
        assert await log.read(position, 10_000) == []  # finds the file corrupt and moves it
        await other.append(rows(7))  # has the moved file open
        assert numbers(await log.read(position, 10)) == [7]
    assert len(warnings(caplog)) == 1
    aside = {"log.corrupt-1", "log.corrupt-1-wal", "log.corrupt-1-shm"}
    assert {each.name for each in tmp_path.iterdir()} == {"log", "log.lock"} | aside


async def test_only_one_of_two_processes_moves_a_corrupt_file(tmp_path, caplog):
    path = tmp_path / "log"
    await make_log(path)
    files = [LogFile(path), LogFile(path)]
    both = threading.Barrier(2)

    def scan(connection: sqlite3.Connection) -> list[Any]:
        try:
            return connection.execute("SELECT payload FROM outcomes").fetchall()
        except sqlite3.DatabaseError:
            both.wait(10)
            raise

    for file in files:
        file.run(lambda _: None)
    scribble(path, 4096, path.stat().st_size - 4096)
    found = await asyncio.gather(*[asyncio.to_thread(file.run, scan) for file in files])
    for file in files:
        file.close()
    assert found == [[], []]
    assert len(warnings(caplog)) == 1
    assert not (tmp_path / "log.corrupt-2").exists()


async def test_deleted_file_is_recreated(tmp_path):
    path = tmp_path / "sub" / "log"
    async with opened(path) as log:
        await log.append(rows(1))
        for each in path.parent.iterdir():
            each.unlink()
        path.parent.rmdir()
        await log.append(rows(2))
        assert numbers(await log.read("", 10)) == [2]


async def test_newer_schema_is_moved_aside(tmp_path, caplog):
    path = tmp_path / "log"
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 99")
        file.execute("CREATE TABLE outcomes (text)")
    file.close()
    async with opened(path) as log:
        await log.append(rows(1))
    assert await kept(path) == [1]
    (sentence,) = warnings(caplog)
    assert "version 99" in sentence
    assert str(tmp_path / "log.future-1") in sentence
    assert sqlite3.connect(tmp_path / "log.future-1").execute("PRAGMA user_version").fetchone() == (
        99,
    )


async def test_other_program_s_database_is_refused_unchanged(tmp_path):
    path = tmp_path / "app.db"
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE customers (name TEXT)")
    file.close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"app\.db is a database of another program"):
        open_log(str(path), 10)
    assert path.read_bytes() == before


@contextmanager
def unprivileged() -> Iterator[None]:
    """Runs as a user with restricted write access, even if the tests run as root."""
    before = os.geteuid()
    if not before:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


def locked_directory(tmp_path: Path) -> Path:
    (tmp_path / "locked").mkdir(mode=0o500)
    return tmp_path / "locked" / "log"


def under_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("not a directory")
    return tmp_path / "file" / "log"


def is_a_directory(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    return tmp_path / "log"


@pytest.mark.parametrize("place", [locked_directory, under_a_file, is_a_directory])
def test_unwritable_path_is_an_error(tmp_path, place):
    path = place(tmp_path)
    with unprivileged(), pytest.raises(ValueError, match="name a file in a directory") as refused:
        open_log(str(path), 10)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("where", "rows_max", "message"),
    [
        ("postgres://host/db", 10, "start with redis://, rediss://, got postgres://"),
        ("", 0, "at least 1"),
    ],
)
def test_invalid_log_setting_is_an_error(where, rows_max, message):
    with pytest.raises(ValueError, match=message):
        open_log(where, rows_max)


@pytest.mark.slow
async def test_locked_file_is_unavailable_until_released(tmp_path):
    path = tmp_path / "log"
    async with opened(path) as log:
        await log.append(rows(1))
        blocker = sqlite3.connect(path, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(LogUnavailable, match=rf"{path} .*locked"):
            await log.append(rows(2))
        assert numbers(await log.read("", 10)) == [1]  # a writer does not block readers
        blocker.execute("ROLLBACK")
        blocker.close()
        await log.append(rows(2), again=True)
        assert numbers(await log.read("", 10)) == [1, 2]


FULL_DISK = """
import asyncio, resource, sys
from services.runtime.outcomelog import LogUnavailable, Row, open_log

async def main():
    log = open_log(sys.argv[1], 10_000)
    await log.append([Row("done", 1, b"small")])
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # the largest size of a file
    big = [Row("done", 1, bytes(1000))] * 1000
    try:
        await log.append(big)
    except LogUnavailable as error:
        print("refused:", error)
    print(len(await log.read("", 5000)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await log.append(big, again=True)
    print(len(await log.read("", 5000)))
    await log.close()

asyncio.run(main())
"""


def test_full_disk_is_unavailable_without_partial_writes(tmp_path):
    output, _ = elsewhere(FULL_DISK, tmp_path / "log").communicate(timeout=60)
    refused, before, after = output.splitlines()
    assert refused.startswith(f"refused: the outcome log {tmp_path / 'log'} cannot be used")
    assert (before, after) == ("1", "1001")


# --- two processes on one file

NEIGHBOUR = """
import asyncio, json, sys
from services.runtime.outcomelog import Journal, Row, open_log

async def main(path, name, count, total):
    got = []
    journal = Journal(open_log(path, 10_000), got.extend, {"a": 1, "b": 1}, poll_s=0.01)
    task = asyncio.create_task(journal.run())
    for number in range(count):
        journal.put(Row(name, 1, b"%d" % number))
        await asyncio.sleep(0.001)
    async with asyncio.timeout(60):
        while len(got) < total:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})
    print(json.dumps([(row.kind, int(row.payload)) for row in got]))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


@pytest.mark.parametrize("before", [b"", GARBAGE], ids=["fresh", "corrupt"])
def test_two_processes_see_the_same_order(tmp_path, before):
    path = tmp_path / "log"
    if before:
        path.write_bytes(before)
    both = [elsewhere(NEIGHBOUR, path, name, 300, 600) for name in "ab"]
    outputs = [process.communicate(timeout=120)[0].splitlines() for process in both]
    first, second = (json.loads(lines[-1]) for lines in outputs)
    assert first == second
    for name in "ab":
        assert [n for kind, n in first if kind == name] == list(range(300))
    assert (tmp_path / "log.corrupt-1").exists() == bool(before)
    assert not (tmp_path / "log.corrupt-2").exists()
