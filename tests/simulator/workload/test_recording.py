"""Recordings: each form of log that is read, the trace that is written, and mistakes."""

import json
import time
from pathlib import Path

import pytest

from services.core import Completion, FinishReason, Report, Request, WorkerView
from services.costs import CostModel
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.event_log import EventLog, Head
from simulator.workload.recording import read_recording, write_trace
from simulator.workload.trace import read_trace
from simulator.workload.workload import Workload
from tests.simulator.fixtures import random_workload


def rows(workload: Workload) -> list[tuple[float, int, int]]:
    columns = (workload.arrival_s, workload.input_tokens, workload.output_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_event_log_of_a_scheduler_becomes_a_workload(tmp_path: Path):
    preset, limits = choose("fcfs"), SchedulerLimits(patience_s=0.0)
    path = tmp_path / "events.log"
    state = SchedulerState(preset, limits)
    view = WorkerView("w", "w", "m", 1_600, 16, 8, 1_600)
    done = Completion("b", 7, FinishReason.STOP)
    events: list[tuple[float, ev.Event]] = [
        (0.0, ev.WorkerAttached("w#1", view)),
        (0.0, ev.Costed("w", CostModel(0.01, 1e-4, 1e-4, 0.0))),
        (5.0, ev.Submitted("g", Request("a", "m", 20, 50, 5.0))),
        (6.5, ev.Submitted("g", Request("b", "m", 30, 50, 6.5))),
        (6.5, ev.Round()),
        (8.0, ev.Reported("w#1", "w", Report(1, 1, finished=(done,)))),
        (9.0, ev.Cancelled("g", "a", FinishReason.CANCELLED, 3)),
    ]
    with EventLog(path, 2**20, Head(preset, limits)) as log:
        for now, event in events:
            state.step(event, now)
            log.append(state.last_step)
    assert rows(read_recording(path)) == [(0.0, 30, 7)]


def test_openai_request_log_becomes_a_workload(tmp_path: Path):
    path = tmp_path / "requests.jsonl"
    entries = [
        {"created": 1_700_000_003, "usage": {"prompt_tokens": 5, "completion_tokens": 6}},
        {
            "timestamp": "2023-11-14T22:13:21+00:00",  # 1,700,000,001 s
            "response": {"usage": {"prompt_tokens": 7, "completion_tokens": 8}},
        },
        {"created": 1_700_000_002, "error": "refused"},
        {"created": 1_700_000_004, "usage": {"prompt_tokens": 9, "completion_tokens": 0}},
    ]
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    assert rows(read_recording(path)) == [(0.0, 7, 8), (2.0, 5, 6)]


def test_times_without_a_zone_are_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two hours lie between the requests, on either side of a clock change in Berlin."""
    path = tmp_path / "requests.jsonl"
    usage = {"prompt_tokens": 5, "completion_tokens": 6}
    times = ("2023-03-26T01:30:00", "2023-03-26T03:30:00")
    path.write_text("\n".join(json.dumps({"timestamp": t, "usage": usage}) for t in times))
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert rows(read_recording(path)) == [(0.0, 5, 6), (7_200.0, 5, 6)]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("indent", [None, 2])
def test_vllm_benchmark_becomes_a_workload(tmp_path: Path, indent: int | None):
    path = tmp_path / "bench.json"
    document = {
        "model": "m",
        "start_times": [10.5, 10.0, 11.0],
        "input_lens": [3, 4, 5],
        "output_lens": [6, 7, 0],  # the last one failed
    }
    path.write_text(json.dumps(document, indent=indent))
    assert rows(read_recording(path)) == [(0.0, 4, 7), (0.5, 3, 6)]


def test_mooncake_trace_keeps_its_block_hashes(tmp_path: Path):
    path, back = tmp_path / "mooncake.jsonl", tmp_path / "trace.csv"
    entries = [
        {"timestamp": 4_500, "input_length": 700, "output_length": 3, "hash_ids": [10**18, 7]},
        {"timestamp": 3_000, "input_length": 513, "output_length": 2, "hash_ids": [10**18, 9]},
        {"timestamp": 5_000, "input_length": 513, "output_length": 0, "hash_ids": [10**18, 9]},
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    recorded = read_recording(path)
    assert rows(recorded) == [(0.0, 513, 2), (1.5, 700, 3)]
    write_trace(back, recorded)
    assert list(read_trace(back).hash_ids) == [[0, 1], [0, 2]]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_written_trace_round_trips(tmp_path: Path, name: str):
    made = random_workload(4, 30, 3.0)
    write_trace(tmp_path / name, made)
    back = read_trace(tmp_path / name)
    assert back.input_tokens.tolist() == made.input_tokens.tolist()
    assert back.output_tokens.tolist() == made.output_tokens.tolist()
    start_s = float(made.arrival_s[0])
    assert back.arrival_s.tolist() == pytest.approx((made.arrival_s - start_s).tolist(), abs=2e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("plain text\n", "is not a readable log"),
        ("[1, 2]\n", "is not a readable log"),
        ('{"created": 1, "error": "x"}\n', "has no finished request"),
        ('{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n', "line 1 has no time"),
        ('{"created": 1, "usage": {"prompt_tokens": 0}}\n', "usage must have prompt_tokens"),
        ('{"created": "soon", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n', "'soon'"),
        (
            '{"created": NaN, "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n',
            "nan is not a",
        ),
        ('{"created": 1}\nnot json\n', "line 2 is not a JSON object"),
        ('{"start_times": [1], "input_lens": [1, 2], "output_lens": [1]}', "of one length"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', "number of milliseconds"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "got 0 and 1"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
            "hash_ids must be",
        ),
        (
            '{"start_times": [1], "input_lens": ["x"], "output_lens": [1]}',
            "request 0: input_lens and",
        ),
        (
            '{"start_times": ["x"], "input_lens": [1], "output_lens": [1]}',
            "request 0: 'x' is not a",
        ),
    ],
)
def test_recording_refuses_unknown_logs_with_the_reason(tmp_path: Path, text: str, says: str):
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_recording(path)
