"""Event logs: header, steps, and errors for files that cannot be replayed."""

import json
from pathlib import Path

import pytest

from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.observe.event_log import FORMAT, EventLog, Head, read, read_head
from services.scheduler.observe.replay import replay
from tests.scheduler.state_driver import worker

HEAD = Head(choose("alise", {"hysteresis": "inf"}), SchedulerLimits(max_queue=7), True, "0.1.0")


def written(path: Path, *times: float) -> Path:
    with EventLog(path, 2**20, HEAD) as log:
        for now in times:
            log.append(ev.Step(ev.Tick(), now, [], []))
    return path


def test_header_rebuilds_state(tmp_path: Path) -> None:
    path = written(tmp_path / "log", 1.0, 2.0)
    assert read_head(path) == HEAD
    assert [entry.now for entry in read(path)] == [1.0, 2.0]
    run = replay(path, 10)
    assert (run.steps, run.differing) == (2, 0)
    assert run.state.preset == HEAD.preset and run.state.limits == HEAD.limits


def test_truncated_last_line_is_skipped(tmp_path: Path) -> None:
    path = written(tmp_path / "log", 1.0, 2.0)
    path.write_bytes(path.read_bytes()[:-9])
    assert [entry.now for entry in read(path)] == [1.0]


def test_differing_step_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog(path, 2**20, HEAD) as log:
        log.append(ev.Step(ev.Tick(), 1.0, [ev.AskArrange(9)], []))
    assert replay(path, 10).differing == 1


def test_event_log_stops_at_max_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog(path, 1, HEAD) as log:
        log.append(ev.Step(worker(), 1.0, [], []))
    assert read_head(path) == HEAD and not list(read(path))


def changed(path: Path, **cells: object) -> Path:
    first, *rest = path.read_bytes().splitlines(keepends=True)
    head = json.loads(first)
    for name, value in cells.items():
        head[name] = head[name] | value if isinstance(value, dict) else value
    path.write_bytes(b"".join([json.dumps(head).encode() + b"\n", *rest]))
    return path


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            {"foretoken_event_log": FORMAT + 1},
            f"has event log format {FORMAT + 1}; this version reads {FORMAT}",
        ),
        (
            {"preset": {"order": "best"}},
            "by foretoken 0.1.0 and cannot be replayed by this version: unknown",
        ),
        ({"preset": {"batching": "x"}}, "cannot be replayed by this version: .*'batching'"),
        ({"limits": {"max_age": 1}}, "cannot be replayed by this version: .*'max_age'"),
    ],
)
def test_incompatible_log_is_refused_with_reason(
    tmp_path: Path, cells: dict[str, object], message: str
) -> None:
    path = changed(written(tmp_path / "log", 1.0), **cells)
    with pytest.raises(ValueError, match=message):
        read_head(path)


@pytest.mark.parametrize("text", ["", "hello\n", "[1.0, {}, []]\n", "{}\n", "\x00\xff\n"])
def test_other_file_is_refused_as_event_log(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log"
    path.write_text(text, "latin-1")
    with pytest.raises(ValueError, match="is not a foretoken event log: its first line is not"):
        list(read(path))


def test_malformed_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "log", 1.0)
    path.write_bytes(path.read_bytes() + b'[2.0, ["Nothing", {}], [], []]\n')
    with pytest.raises(ValueError, match=r"line 3 of .* is not a step of a scheduler"):
        list(read(path))
