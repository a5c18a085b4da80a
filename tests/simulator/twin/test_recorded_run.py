"""Logs that a twin cannot be made of, each with the reason, and what is left out of others."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from services.core import Completion, FinishReason, Report, Request, WorkerView
from services.costs import CostModel, Direction, StepTiming, SwapTiming
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.event_log import FORMAT, EventLog, Head
from simulator.twin.recorded_run import read_run
from simulator.twin.twin import measured_hardware

Timed = tuple[float, ev.Event]
COST = CostModel(0.01, 1e-4, 1e-4, 0.0, upload_token_s=1e-5)
COSTED = (5.5, ev.Costed("w", COST))


def attached(name: str = "w", model: str = "m") -> Timed:
    view = WorkerView(name, name, model, 1_600, 16, 8, 1_600)
    return 5.0, ev.WorkerAttached(f"{name}#1", view)


def submitted(name: str, at_s: float, model: str = "m") -> Timed:
    return at_s, ev.Submitted("g", Request(name, model, 20, 50, at_s - 0.5))


def reported(at_s: float, seq: int, name: str, tokens: int, worker: str = "w") -> Timed:
    """The end of a request, one token in each of the last steps of 0.1 s."""
    done = Completion(name, tokens, FinishReason.STOP)
    timings = tuple(StepTiming(0, 1, 20, 0.1) for _ in range(tokens))
    report = Report(seq, seq, finished=(done,), timings=timings)
    return at_s, ev.Reported(f"{worker}#1", worker, report)


def write(path: Path, *events: Timed) -> Path:
    preset, limits = choose("fcfs"), SchedulerLimits(patience_s=0.0)
    state = SchedulerState(preset, limits)
    with EventLog(path, 2**20, Head(preset, limits)) as log:
        for now, event in events:
            state.step(event, now)
            log.append(state.last_step)
    return path


def test_run_is_read_with_hand_worked_times(tmp_path: Path):
    """The worker attached at 5 s. Request a arrived at its gateway at 9.5 s and has three tokens,
    of which the last was reported at 11 s; b was cancelled; c has not ended."""
    path = write(
        tmp_path / "log",
        attached(),
        COSTED,
        submitted("a", 10.0),
        submitted("b", 10.1),
        submitted("c", 10.2),
        (10.3, ev.Round()),
        reported(11.0, 1, "a", 3),
        (12.0, ev.Cancelled("g", "b", FinishReason.CANCELLED, 0)),
    )
    run = read_run(path).run
    assert (run.ids, run.left_out) == (("a",), 2)
    assert run.workload.arrival_s.tolist() == [5.0]
    assert run.workload.output_tokens.tolist() == [3]
    assert run.records.arrival_s.tolist() == [4.5]
    assert run.records.first_s.tolist() == pytest.approx([5.8])
    assert run.records.last_s.tolist() == [6.0]
    assert run.advice == ((0.5, ev.Costed("w0", COST)),)
    [hardware] = measured_hardware(run)  # too few steps to fit
    assert hardware.cost.prefill_token_s == COST.prefill_token_s
    assert (hardware.kv_tokens, hardware.max_running) == (1_600, 8)


def test_truncated_last_line_is_skipped(tmp_path: Path):
    path = write(
        tmp_path / "log",
        attached(),
        submitted("a", 10.0),
        (10.3, ev.Round()),
        reported(11.0, 1, "a", 3),
        submitted("b", 12.0),
    )
    path.write_bytes(path.read_bytes()[:-9])
    run = read_run(path).run
    assert (run.ids, run.left_out) == (("a",), 0)


def no_finished_request(path: Path) -> None:
    write(path, attached(), submitted("a", 10.0))


def two_models(path: Path) -> None:
    write(
        path,
        attached(),
        attached("v", "n"),
        submitted("a", 10.0),
        submitted("b", 10.0, "n"),
        (10.3, ev.Round()),
        reported(11.0, 1, "a", 3),
        reported(11.0, 1, "b", 3, "v"),
    )


def lost_worker(path: Path) -> None:
    write(
        path,
        attached(),
        attached("v"),
        submitted("a", 10.0),
        (10.3, ev.Round()),
        (10.5, ev.WorkerLost("v#1", "v")),
        reported(11.0, 1, "a", 3),
    )


def older_version(path: Path) -> None:
    no_finished_request(path)
    first, *rest = path.read_bytes().splitlines(keepends=True)
    head = json.loads(first) | {"foretoken_event_log": FORMAT - 1}
    path.write_bytes(b"".join([json.dumps(head).encode() + b"\n", *rest]))


def malformed_line(path: Path) -> None:
    no_finished_request(path)
    path.write_bytes(path.read_bytes() + b"{}\n")


def no_file(path: Path) -> None:
    assert not path.exists()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (no_finished_request, "has no finished request"),
        (two_models, r"requests of several models \(m, n\); a twin simulates one: record each"),
        (lost_worker, "worker v left before the last request finished"),
        (older_version, f"has event log format {FORMAT - 1}; this version reads {FORMAT}"),
        (malformed_line, "line 4 of .* is not a step of a scheduler"),
        (lambda path: path.write_text("id,tokens\n"), "is not a foretoken event log"),
        (no_file, "cannot read .*: No such file"),
    ],
)
def test_unsuitable_log_is_refused_with_the_reason(
    tmp_path: Path, make: Callable[[Path], None], says: str
):
    make(tmp_path / "log")
    with pytest.raises(ValueError, match=says):
        read_run(tmp_path / "log")


def test_worker_without_steps_or_cost_needs_a_hardware_file(tmp_path: Path):
    path = write(
        tmp_path / "log",
        attached(),
        submitted("a", 10.0),
        (10.3, ev.Round()),
        reported(11.0, 1, "a", 3),
    )
    with pytest.raises(ValueError, match="3 steps of w and no cost model: record a longer run"):
        measured_hardware(read_run(path).run)


def test_copies_of_the_log_replace_those_of_the_estimator(tmp_path: Path):
    """Three uploads of 10 tokens take 1 ms, 2 ms and 9 ms: the median is 0.2 ms a token. No
    offload was reported, so the estimator's last model has it."""
    swaps = tuple(SwapTiming(Direction.UPLOAD, 10, each_s) for each_s in (0.001, 0.002, 0.009))
    cost = CostModel(0.01, 1e-4, 1e-4, 0.0, offload_token_s=3e-5, upload_token_s=1e-5)
    path = write(
        tmp_path / "log",
        attached(),
        (5.5, ev.Costed("w", cost)),
        submitted("a", 10.0),
        (10.3, ev.Round()),
        (10.5, ev.Reported("w#1", "w", Report(1, 1, swaps=swaps))),
        reported(11.0, 2, "a", 3),
    )
    [hardware] = measured_hardware(read_run(path).run)
    assert hardware.cost.upload_token_s == pytest.approx(2e-4)
    assert hardware.cost.offload_token_s == 3e-5
