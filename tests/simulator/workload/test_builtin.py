"""Built-in workloads: lengths, arrivals, and mistakes."""

from pathlib import Path

import numpy as np
import pytest

from simulator.workload.builtin import ARRIVALS, LENGTHS, WORKLOADS, build_workload
from simulator.workload.workload import MAX_SPAN_S, MIN_RATE, Workload
from tests.simulator.fixtures import workload


@pytest.mark.parametrize("name", LENGTHS)
def test_uniform_lengths_include_both_bounds(name: str):
    bounds = LENGTHS[name]
    made = build_workload(name, 60_000, "burst", 0.0, 0, 0)
    for lengths, (low, high) in (
        (made.input_tokens, bounds.input_tokens),
        (made.output_tokens, bounds.output_tokens),
    ):
        assert (int(lengths.min()), int(lengths.max())) == (low, high)


def test_varying_workload_joins_d1_d2_and_d3_in_this_order():
    made = build_workload("varying", 300, "burst", 0.0, 0, 0)
    d1, d2, d3 = np.split(made.output_tokens, 3)
    assert d1.min() >= 2_048
    assert d2.min() >= 3_000
    assert d3.min() < 2_048


@pytest.mark.parametrize("arrivals", sorted(set(ARRIVALS) - {"burst"}))
def test_workload_arrivals_have_the_requested_rate(arrivals: str):
    made = build_workload("d1", 20_000, arrivals, 5.0, 0, 3)
    assert made.rate == pytest.approx(5.0, rel=0.05)


def test_gamma_arrivals_are_burstier_than_poisson():
    def variation(arrivals: str) -> float:
        gaps = np.diff(build_workload("d1", 20_000, arrivals, 5.0, 0, 3).arrival_s)
        return float(gaps.std() / gaps.mean())

    assert variation("poisson") == pytest.approx(1.0, rel=0.05)
    assert variation("gamma") == pytest.approx(2.0, rel=0.1)


def test_workload_is_determined_by_its_seed():
    one, same, other = (build_workload("d3", 50, "poisson", 2.0, 0, seed) for seed in (1, 1, 2))
    assert one.arrival_s.tolist() == same.arrival_s.tolist()
    assert one.output_tokens.tolist() == same.output_tokens.tolist()
    assert one.output_tokens.tolist() != other.output_tokens.tolist()


def test_lengths_are_drawn_from_a_file(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text("input_tokens,output_tokens\n5,6\n7,8\n")
    made = build_workload(str(path), 100, "even", 10.0, 0, 0)
    assert made.name == "mine"
    pairs = set(zip(made.input_tokens.tolist(), made.output_tokens.tolist(), strict=True))
    assert pairs == {(5, 6), (7, 8)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("d9", 10, "poisson", 1.0, 0, 0), f"unknown workload 'd9'.*{WORKLOADS[0]}"),
        (("varing", 10, "poisson", 1.0, 0, 0), "did you mean varying"),
        (("d1", 10, "posson", 1.0, 0, 0), "unknown arrivals 'posson'"),
        (("d1", 10, "poisson", 0.0, 0, 0), "need a positive rate"),
        (("d1", 0, "poisson", 1.0, 0, 0), "at least 1 request"),
        (("d1", 10, "burst", 1.0, 0, 0), "burst come all at once and have no rate, got 1"),
    ],
)
def test_invalid_workload_options_are_refused_with_the_known_values(
    arguments: tuple[str, int, str, float, int, int], says: str
):
    with pytest.raises(ValueError, match=says):
        build_workload(*arguments)


def test_workload_is_stretched_to_a_rate():
    made = workload([(0.0, 1, 1), (1.0, 2, 2), (4.0, 3, 3)])
    assert made.rate == pytest.approx(0.5)
    assert made.at_rate(2.0).arrival_s.tolist() == [0.0, 0.25, 1.0]
    with pytest.raises(ValueError, match="arrive at once"):
        workload([(0.0, 1, 1), (0.0, 1, 1)]).at_rate(1.0)
    long = workload([(float(row), 1, 1) for row in range(1_000)])
    assert long.at_rate(long.least_rate).arrival_s[-1] <= MAX_SPAN_S
    with pytest.raises(ValueError, match="fewer requests or a higher rate"):
        long.at_rate(MIN_RATE)


@pytest.mark.parametrize(
    ("arrival_s", "inputs", "says"),
    [
        ([0.0, 1.0], [1], "rows"),
        ([], [], "no request"),
        ([1.0, 0.0], [1, 1], "must be numbers from 0 on, ascending"),
        ([0.0, 1.0], [1, 0], "at least 1"),
        ([0.0, 4e8], [1, 1], r"arrives after 4e\+08 s, and a simulation covers 315,360,000 s"),
    ],
)
def test_workload_checks_its_columns(arrival_s: list[float], inputs: list[int], says: str):
    lengths = np.array(inputs, np.int64)
    with pytest.raises(ValueError, match=says):
        Workload("bad", np.array(arrival_s), lengths, lengths)


def test_taken_requests_keep_all_their_columns():
    rows = Workload(
        "rows",
        np.array([0.0, 1.0, 2.0]),
        np.array([10, 20, 30]),
        np.array([1, 2, 3]),
        kinds=["a", "b", "c"],
        prompts=["x", "y", "z"],
        hash_ids=[[1], [2], [3]],
    )
    taken = rows.take(np.array([0, 2]))
    assert taken.arrival_s.tolist() == [0.0, 2.0]
    assert (taken.input_tokens.tolist(), taken.output_tokens.tolist()) == ([10, 30], [1, 3])
    assert (taken.kinds, taken.prompts, taken.hash_ids) == (["a", "c"], ["x", "z"], [[1], [3]])
