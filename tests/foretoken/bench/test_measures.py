"""Figures, worked by hand."""

from array import array
from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.bench.measures import (
    Budgets,
    Spread,
    error_kind,
    figures,
    peak_concurrency,
    quantile,
    timeline,
)
from foretoken.bench.samples import STOPPED, TIMED_OUT, Sample


def sample(
    due_s: float, *text_s: float, tokens: int = 0, sent_s: float | None = None, **more: object
) -> Sample:
    made = Sample(
        due_s, text_s=array("d", text_s), output_tokens=tokens or len(text_s), has_usage=True
    )
    made.sent_s = due_s if sent_s is None else sent_s
    made.end_s = text_s[-1] if text_s else due_s
    for name, value in more.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("one", "ttft_s", "tpot_s", "longest_gap_s", "e2e_s"),
    [
        # Due at 1, texts at 3, 4, 7: first after 2, then gaps of 1 and 3.
        (sample(1, 3, 4, 7), 2, 2, 3, 6),
        # The same, each message two tokens: five steps between six.
        (sample(1, 3, 4, 7, tokens=6), 2, 4 / 5, 3, 6),
        # All at once.
        (sample(1, 3), 2, None, 0, 2),
        # Sent late: that counts.
        (sample(1, 3, 4, sent_s=2.5), 2, 1, 1, 3),
        # No text at all: the end stands for the first.
        (sample(1, end_s=5), 4, None, 0, 4),
        # It ends later than its last text.
        (sample(1, 2, 3, end_s=4), 1, 1, 1, 3),
    ],
)
def test_sample_computes_its_latencies(
    one: Sample, ttft_s: float, tpot_s: float | None, longest_gap_s: float, e2e_s: float
) -> None:
    assert (one.ttft_s, one.longest_gap_s, one.e2e_s) == (ttft_s, longest_gap_s, e2e_s)
    assert one.tpot_s == pytest.approx(tpot_s)


@pytest.mark.parametrize(
    ("budgets", "met"),
    [
        (Budgets(), True),
        (Budgets(ttft_s=2), True),
        (Budgets(ttft_s=1.9), False),
        (Budgets(tpot_s=2), True),
        (Budgets(tpot_s=1.9), False),
        (Budgets(mtpot_s=3), True),
        (Budgets(mtpot_s=2.9), False),
        (Budgets(2, 2, 3), True),
    ],
)
def test_budgets_decide_goodput(budgets: Budgets, met: bool) -> None:
    assert budgets.met_by(sample(1, 3, 4, 7)) is met
    assert not budgets.met_by(sample(1, 3, 4, 7, problem=TIMED_OUT))


def test_figures_are_computed_from_one_round() -> None:
    samples = [
        sample(0, 1, 2, tokens=4, prompt_tokens=10, sla_class="fast"),  # TTFT 1, TPOT 1/3
        sample(1, 4, 5, tokens=2, prompt_tokens=20, sla_class="slow"),  # TTFT 3, TPOT 1
        sample(2, 3, sla_class="fast", has_usage=False, sent_s=2.25),
        sample(3, problem="HTTP 429: queue is full", end_s=3.5),
        sample(3, problem=TIMED_OUT, end_s=9),
        sample(4, problem=STOPPED, end_s=9),
    ]
    classes = {"fast": Budgets(ttft_s=1), "slow": Budgets(ttft_s=2)}
    found = figures(samples, 10, classes, client_cpu=0.25)
    assert (found.requests, found.completed, found.output_tokens, found.prompt_tokens) == (
        5,
        3,
        7,
        30,
    )
    assert (found.requests_per_s, found.tokens_per_s, found.client_cpu) == (0.3, 0.7, 0.25)
    assert not found.has_usage and found.late_s.maximum == 0.25
    ttft = found.latencies["ttft_s"]
    assert (ttft.p50, ttft.maximum, ttft.count) == (1, 3, 3)
    assert ttft.mean == pytest.approx(5 / 3)
    assert found.latencies["tpot_s"].count == 2  # one token has none
    assert list(map(found.latencies["itl_s"].__getattribute__, ("count", "maximum"))) == [2, 1]
    assert found.errors == {"HTTP 429: queue is full": 1, TIMED_OUT: 1}
    # Two named `fast` and kept it; those that named none count with both classes, and failed.
    fast, slow = found.goodput["fast"], found.goodput["slow"]
    assert (fast.met, fast.total, fast.per_s) == (2, 4, 0.2)
    assert (slow.met, slow.total, slow.share) == (0, 3, 0)


def test_figures_without_samples_are_nan() -> None:
    found = figures([], 1, {"any": Budgets()})
    assert found.requests == 0 and isnan(found.latencies["ttft_s"].p99)
    assert isnan(found.goodput["any"].share) and found.errors == {}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantile_equals_numpy(values: list[float], share: float) -> None:
    ours = quantile(sorted(values), share)
    assert ours == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-6)


def test_spread_covers_all_values() -> None:
    found = Spread.from_values([3, 1, 2])
    assert (found.mean, found.p50, found.maximum, found.count) == (2, 2, 3, 3)
    assert found.p90 == pytest.approx(2.8) and found.p99 == pytest.approx(2.98)


def test_peak_concurrency_counts_overlapping_requests() -> None:
    spans = [(0, 4), (1, 2), (2, 3), (3, 9), (9, 10)]
    assert peak_concurrency(sample(a, b, sent_s=a) for a, b in spans) == 2
    assert peak_concurrency([]) == 0


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        ("HTTP 429: 'cmpl-4fe1aa93b2' was refused", "HTTP 429: '…' was refused"),
        ("HTTP 500: internal error", "HTTP 500: internal error"),
        ("at most 131072 tokens", "at most 131072 tokens"),
    ],
)
def test_error_kind_ignores_ids(problem: str, kind: str) -> None:
    assert error_kind(problem) == kind


def test_timeline_spreads_tokens_over_messages() -> None:
    line = timeline([sample(0, 0.5, 1.5, tokens=4), sample(1, 3.9)], 4, steps=4)
    assert line.at_s == [0, 1, 2, 3]
    assert line.tokens_per_s == [2, 2, 0, 1]
    assert line.running == [1, 2, 1, 1]
