"""The benchmark of the picker: the time that it adds, read from its histogram."""

import json
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from benchmarks.epp import pick_times, report_picks
from benchmarks.harness.histograms import quantile, read_buckets
from observability.exposition import Part, expose
from observability.metrics.metric import ROUND_S
from services.picker.metrics import PickerMetrics


def metrics_text(*seconds: float) -> str:
    """The metrics of a picker that has placed requests in these times."""
    registry = CollectorRegistry()
    made = PickerMetrics(registry, dict, lambda: 0)
    for each in seconds:
        made.pick.observe(each)
    return expose([Part(registry)])


def test_pick_times_are_within_their_bucket() -> None:
    drawn = np.random.default_rng(1).lognormal(-7, 1, 500)
    found = pick_times(metrics_text(*drawn))
    assert found["requests"] == 500
    for key, share in (("p50_s", 0.5), ("p99_s", 0.99)):
        exact, read = float(np.quantile(drawn, share)), found[key]
        upper = next(bound for bound in ROUND_S if bound >= exact)
        lower = max((bound for bound in ROUND_S if bound < exact), default=0.0)
        assert read is not None and lower <= read <= upper


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((4, 4, 4), 0.5, 0.5), ((0, 4, 4), 0.5, 1.5), ((1, 2, 2), 0.75, 1.5),
        ((1, 1, 2), 0.99, 2.0), ((0, 0, 0), 0.5, None),
    ],
)  # fmt: skip
def test_quantile_is_interpolated_within_its_bucket(
    counts: tuple[int, ...], share: float, expected: float | None
) -> None:
    bounds = (1.0, 2.0, float("inf"))
    assert quantile(list(zip(bounds, map(float, counts), strict=True)), share) == expected


def test_buckets_of_all_series_are_added() -> None:
    text = "# TYPE t_s histogram\n" + "".join(
        f't_s_bucket{{worker="{worker}",le="{bound}"}} {count}\n'
        for worker, counts in (("a", (1, 2)), ("b", (3, 5)))
        for bound, count in zip(("0.5", "+Inf"), counts, strict=True)
    )
    assert read_buckets(text, "t_s") == [(0.5, 4.0), (float("inf"), 7.0)]
    assert read_buckets(text, "other_s") == []


def test_times_are_printed_and_added_to_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "epp.json"
    record.write_text('{"servers": []}')
    report_picks(pick_times(metrics_text(0.0015, 0.0015)), str(record))
    assert json.loads(record.read_text()) == {
        "servers": [], "picker_adds": {"p50_s": 0.0015, "p99_s": 0.00199, "requests": 2.0},
    }  # fmt: skip
    report_picks(pick_times(metrics_text()), "")
    printed = [line.split()[-3:] for line in capsys.readouterr().out.splitlines()]
    head = ["p50", "p99", "requests"]
    assert printed == [head, ["1.50", "1.99", "2"], head, ["–", "–", "0"]]
