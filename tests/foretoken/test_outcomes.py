"""`foretoken outcomes`: where the outcomes of a log come from, and that reading changes nothing."""

import asyncio
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from foretoken.commands.offline.outcomes import outcomes
from foretoken.commands.usage import UsageError
from services.core import FinishReason, Outcome
from services.predictor.learning.records import KIND, READ_LATE, encode
from services.runtime.config import ConfigError
from services.runtime.outcomelog import OutcomeLog, Row, open_log
from tests.redis_server import PASSWORD, running_redis, url

NOON_S = datetime(2026, 3, 1, 12).timestamp()  # of local time, as the command prints it
HOUR_S = 3600.0


def row(
    key: str,
    scheduler: str,
    application: str = "",
    tokens: int = 10,
    hour: int = 0,
    kind: str = KIND,
) -> Row:
    outcome = Outcome(
        "r", "demo", application, 5, tokens, 900, FinishReason.STOP, 1.0, 0, key, scheduler
    )  # fmt: skip
    return encode(outcome, None, "", "predictor-0", NOON_S + hour * HOUR_S, kind)


ROWS = [
    row("ada", "s-1"), row("ada", "s-1", tokens=30, hour=1), row("ada", "s-2", "chat", hour=2),
    row("eve", "s-1", tokens=900, hour=2), row("eve", "s-1", tokens=900, hour=2),
    row("eve", "s-1", tokens=900, hour=2), row("", "", hour=1),
    row("ada", "s-1", kind=READ_LATE), Row(KIND, 1, b"\xff"),
]  # fmt: skip


@pytest.fixture(params=["file", "redis"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield str(tmp_path / "outcomes.sqlite")
        return
    with running_redis(request.getfixturevalue("redis_program"), tmp_path) as server:
        yield url(server.port)


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(outcomes)
    return CliRunner().invoke(app, arguments)


def lines(*arguments: str) -> list[str]:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return [" ".join(line.split()) for line in result.output.splitlines()]


async def written(where: str, rows: list[Row]) -> OutcomeLog:
    log = open_log(where, 1_000)
    await log.append(rows)
    return log


async def test_sources_are_counted_while_a_server_writes_the_log(where: str) -> None:
    log = await written(where, ROWS)
    found = await asyncio.to_thread(lines, where)
    await log.append([row("bob", "s-1")])
    assert len(await log.read("", 100)) == len(ROWS) + 1 and not log.replaced
    await log.close()
    assert PASSWORD not in found[0] and found[0].endswith(": 7 outcomes")
    assert found[1:7] == [
        "1 more cannot be read, and are not learned from",
        "scheduler key application outcomes mean tokens first last",
        "s-1 eve - 3 900 2026-03-01 14:00 2026-03-01 14:00",
        "s-1 ada - 2 20 2026-03-01 12:00 2026-03-01 13:00",
        "s-2 ada chat 1 10 2026-03-01 14:00 2026-03-01 14:00",
        "- - - 1 10 2026-03-01 13:00 2026-03-01 13:00",
    ]
    assert "--set log.leave_out=NAME" in " ".join(found[7:])


def write(path: Path, rows: list[Row]) -> str:
    """The path of a log that no server has open."""

    async def write() -> None:
        await (await written(str(path), rows)).close()

    asyncio.run(write())
    return str(path)


@pytest.fixture
def log(tmp_path: Path) -> str:
    return write(tmp_path / "demo" / "outcomes.sqlite", ROWS)


def test_times_are_printed_latest_first_and_rows_are_bounded(log: str) -> None:
    found = lines(log, "--by", "key, hour", "--rows", "3")
    assert [each.rpartition(" 2026")[0].rpartition(" 2026")[0] for each in found[3:6]] == [
        "eve 2026-03-01 14:00 3 900", "ada 2026-03-01 14:00 1 10", "ada 2026-03-01 13:00 1 30",
    ]  # fmt: skip
    assert found[6] == "… and 2 rows more; --rows 5 prints all"


def test_reading_leaves_the_files_as_they_are(log: str) -> None:
    before = {path.name: path.read_bytes() for path in Path(log).parent.iterdir()}
    assert lines(str(Path(log).parent)) == lines(str(Path(log).parents[1])) == lines(log)
    after = {path.name: path.read_bytes() for path in Path(log).parent.iterdir()}
    assert {name: after[name] for name in before} == before


def test_application_of_a_client_does_not_reach_the_terminal_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "log", [row("k", "s", "\x1b[2J\n" + "a" * 90)])
    assert lines(path)[2].startswith("s k ?[2J?aaa") and "…" in lines(path)[2]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there are no outcomes in .*/state/foretoken: name the file or URL of log.path"),
        (["missing"], "there are no outcomes in missing: name"),
        ([".", "--by", "kye"], "--by takes scheduler, key, .*; got 'kye', did you mean key"),
        ([".", "--by", ""], "--by takes scheduler, key, .*; got ''"),
        (["http://host"], r"log.path .* must be a file or start with redis://, rediss://"),
    ],
)
def test_mistake_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    error = run(*arguments).exception
    assert isinstance(error, UsageError | ConfigError | ValueError)
    with pytest.raises(type(error), match=sentence):
        raise error


def test_log_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("no database" * 100)
    for where, cause in (
        (str(other), "cannot be read: file is not a database"),
        (f"redis://:{PASSWORD}@127.0.0.1:1", "cannot be used: Error 111"),
    ):
        result = run(where)
        assert result.exit_code == 1 and result.output.startswith("foretoken outcomes: the outcome")
        assert cause in result.output and PASSWORD not in result.output
    assert other.read_text() == "no database" * 100
