"""The curve rule: worked examples, enumeration of all futures, and a feedback transcript."""

from collections.abc import Sequence
from itertools import product, takewhile
from math import exp, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.forecast import Forecast, Ints, certain, from_lengths
from services.policies.form.curve import LARGEST_Z, TIMES, CurveDemand, Z, feedback
from services.policies.form.demand import WorkerQueues
from services.policies.form.registry import FORMS
from services.policies.memory import PolicyMemory
from services.policies.parameters import resolve
from services.policies.snapshot import RequestColumns, Snapshot
from tests.policies.form.peak_oracle import peak_tokens
from tests.policies.made_snapshots import (
    count_fitting,
    demanded,
    fill_queue,
    jobs,
    line,
    node,
    table,
)

FIXED_Z = {"eviction_share": 0.0}


def curve(
    made: RequestColumns,
    forecasts: Sequence[Forecast],
    z: float = 1.0,
    kv: int = 1_000,
    block: int = 1,
    limits: Ints | None = None,
) -> CurveDemand:
    worker = node(kv_tokens=kv, block_tokens=block)
    demand = demanded("curve", made, worker, table(*forecasts), FIXED_Z | {"z": z}, limits=limits)
    assert isinstance(demand, CurveDemand)
    return demand


def needs(demand: CurveDemand, base: int = 0) -> list[float]:
    """Return the need of every prefix beyond the base."""
    count = len(demand.held)
    need = count_fitting(demand, range(count), base, count - base)[1]
    return [need(k) for k in range(count - base + 1)]


TWO_OR_SIX = Forecast((2.0, 6.0), (0.5, 0.5), 6)


def test_curve_of_two_lengths_matches_worked_example() -> None:
    """Prompts have 10 tokens and outputs 2 or 6, each with probability ½. A request holds 10 tokens
    now, 11 and 12 at its first two tokens, then nothing or 13 … 16.

    One request: at 2, E = 12 and sd = 0; at 6, E = 8 and sd = √(16² · ½ · ½) = 8. The maximum is 16
    with z = 1 and 12 with z = 0. Two requests: at 2, 24; at 6, 16 + z · √(2 · 64) = 16 + 11.31 z.
    """
    made = jobs(2, prompt=[10, 10], cap=[6, 6])
    assert needs(curve(made, [TWO_OR_SIX])) == pytest.approx([0, 16, 16 + sqrt(128)])
    assert needs(curve(made, [TWO_OR_SIX], z=0)) == pytest.approx([0, 12, 24])
    assert needs(curve(made, [TWO_OR_SIX], z=0.5), 1) == pytest.approx([12, 24])
    assert needs(curve(made, [TWO_OR_SIX], z=2)) == pytest.approx([0, 24, 16 + 2 * sqrt(128)])


def test_curve_conditions_lengths_on_generated_tokens() -> None:
    """After 2 tokens, 4 more are certain: 10 + 2 + 4. Past its last point of 6 tokens a request
    makes a third token, which fills 10 + 6 + 3, with probability e^(−2 / 6). Beyond its cap nothing
    remains."""
    made = jobs(1, prompt=[10], output=[2], cap=[9])
    assert needs(curve(made, [TWO_OR_SIX])) == [0, 16]
    third = exp(-2 / 6)
    outlived = curve(jobs(1, prompt=[10], output=[6], cap=[9]), [TWO_OR_SIX])
    assert needs(outlived) == pytest.approx([0, 19 * (third + sqrt(third * (1 - third)))])
    assert needs(curve(jobs(1, prompt=[10], output=[9], cap=[9]), [TWO_OR_SIX])) == [0, 19]
    assert needs(curve(jobs(1, prompt=[10], cap=[4]), [TWO_OR_SIX])) == pytest.approx([0, 14])


def test_curve_counts_whole_blocks() -> None:
    """10 + 6 tokens need one block of 16, 11 + 6 need two; a request that holds three blocks counts
    three."""
    one = {"prompt": [10], "cap": [6]}
    assert needs(curve(jobs(1, **one), [certain(6)], block=16)) == [0, 16]
    assert needs(curve(jobs(1, prompt=[11], cap=[6]), [certain(6)], block=16)) == [0, 32]
    assert needs(curve(jobs(1, **one, blocks=[3]), [certain(6)], block=16)) == [0, 48]


def test_curve_limit_excludes_reserved_memory() -> None:
    demand = demanded("curve", jobs(1), node(kv_tokens=200), table(certain(9)), {"reserved": 0.1})
    assert demand.limits[0] == 180


# Enumeration of all futures

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)
alive = st.tuples(st.integers(1, 9), st.integers(0, 4), lengths).filter(
    lambda row: row[1] < max(row[2])
)
few = st.lists(alive, min_size=1, max_size=4)


def forecast_of(support: Sequence[int]) -> Forecast:
    return from_lengths(support, 9, "h")


@settings(max_examples=150)
@given(few, st.sampled_from([0.0, 1.0, 2.5]), st.lists(st.sampled_from([1, 2, 3, 9]), min_size=4))
def test_curve_matches_enumeration_of_all_futures(
    rows: list[tuple[int, int, list[int]]], z: float, slices: list[int]
) -> None:
    """Compare mean and deviation of the held tokens at each time, over the product of all
    lengths. Each request makes the tokens of its slice and then keeps its memory, unless it ends at
    its cap of 9."""
    ends = [[length - g for length in sorted(support) if length > g] for _, g, support in rows]
    made = jobs(
        len(rows),
        prompt=[p for p, _, _ in rows],
        output=[g for _, g, _ in rows],
        cap=[9] * len(rows),
        forecast=range(len(rows)),
    )
    limits = np.minimum(made.output + slices[: len(rows)], 9)
    stops = np.where(limits < 9, limits - made.output, 9)
    last = int(max(limits - made.output))
    found = needs(curve(made, [forecast_of(support) for *_, support in rows], z, limits=limits))

    def top(first: int) -> float:
        tops = [float(sum(p + g for p, g, _ in rows[:first]))]
        for t in range(1, last + 1):
            made_by_then = np.minimum(stops, t).tolist()
            futures = [
                sum(
                    p + g + u if end >= u else 0
                    for end, u, (p, g, _) in zip(future, made_by_then, rows, strict=False)
                )
                for future in product(*ends[:first])
            ]
            tops.append(float(np.mean(futures) + z * np.std(futures)))
        return max(tops)

    assert found == pytest.approx([top(k) for k in range(len(rows) + 1)])


certain_rows = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(1, 60)), max_size=TIMES
)


@settings(max_examples=200)
@given(certain_rows, st.sampled_from([0.0, 3.0]))
def test_curve_with_certain_lengths_equals_past_future_peak(
    rows: list[tuple[int, int, int]], z: float
) -> None:
    prompt, output, left = np.array(rows, np.int64).reshape(-1, 3).T
    made = jobs(
        len(rows), prompt=prompt, output=output, cap=output + left, forecast=range(len(rows))
    )
    found = needs(curve(made, [certain(int(length)) for length in output + left], z))
    assert found == [peak_tokens((prompt + output)[:k], left[:k]) for k in range(len(rows) + 1)]


@settings(max_examples=150)
@given(
    st.integers(1, 40), st.sampled_from([0.0, 1.5]), st.integers(0, 2**32), st.integers(1, 30_000),
    st.sampled_from([1, 16]), st.data(),
)  # fmt: skip
def test_curve_longest_prefix_matches_linear_scan(
    count: int, z: float, seed: int, kv: int, block: int, data: st.DataObject
) -> None:
    """Compare with a linear scan over random orders of random subsets, and with each row added
    alone."""
    rng = np.random.default_rng(seed)
    forecasts = [from_lengths(rng.integers(1, 800, 80).tolist(), 900, "h"), certain(60)]
    made = jobs(
        count,
        prompt=rng.integers(1, 300, count),
        output=rng.integers(0, 900, count),
        cap=np.full(count, 900),
        forecast=rng.integers(0, 2, count),
    )
    demand = curve(made, forecasts, z, kv, block)
    means, variances = demand.moments[0], demand.moments[-1]  # without z, only the means
    assert len(means) <= TIMES + 1
    order = rng.permutation(count)[: data.draw(st.integers(0, count))]
    base = data.draw(st.integers(0, len(order)))
    most = data.draw(st.integers(0, len(order) - base))

    def need(rows: Ints) -> float:
        mean = sum((means[:, row] for row in rows), np.zeros(len(means)))
        variance = sum((variances[:, row] for row in rows), np.zeros(len(means)))
        return float(np.max(mean + z * np.sqrt(variance)))

    def fits(rows: Ints) -> bool:
        return need(rows) <= float(demand.limits[0])

    more, reported = count_fitting(demand, order, base, most)
    assert more == len(list(takewhile(lambda k: fits(order[: base + k]), range(1, most + 1))))
    asked = range(min(most, more + 1) + 1)
    assert [reported(k) for k in asked] == pytest.approx([need(order[: base + k]) for k in asked])
    assert [reported(k) for k in asked] == sorted(reported(k) for k in asked)
    kept, later = order[:base], order[base:]
    expected = [fits(np.append(kept, row)) for row in later]
    assert demand.able(line(kept), line(later)).tolist() == expected


# Feedback


def seen(evictions: int, endings: int, waiting: int = 1) -> Snapshot:
    made, empty = jobs(waiting), np.arange(0)
    return Snapshot(
        0.0, made, np.arange(waiting), empty, (), table(), evictions=evictions, endings=endings
    )


def test_feedback_transcript() -> None:
    """Each eviction raises z by 0.1, each ending lowers it by 0.1 · 0.05 = 0.005; each counts
    once."""
    given_params = {"z": 1.0, "reserved": 0.0, "eviction_share": 0.05}
    memory, zs = PolicyMemory(), []
    for evictions, endings in [(0, 0), (1, 0), (1, 20), (1, 20), (4, 40), (99, 40), (99, 4_000)]:
        memory = feedback(seen(evictions, endings), given_params, memory)
        zs.append(memory.number(Z, -1.0))
    assert zs == pytest.approx([-1.0, 1.1, 1.0, 1.0, 1.2, LARGEST_Z, 0.0])


def test_endings_without_waiting_requests_leave_z_unchanged() -> None:
    """1,000 endings do not count; the next 20 lower z by 0.1, and an eviction raises it."""
    given_params = {"z": 1.0, "reserved": 0.0, "eviction_share": 0.05}
    memory, zs = PolicyMemory(), []
    for evictions, endings, waiting in [(0, 1_000, 0), (0, 1_020, 1), (1, 1_020, 0)]:
        memory = feedback(seen(evictions, endings, waiting), given_params, memory)
        zs.append(memory.number(Z))
    assert zs == pytest.approx([1.0, 0.9, 1.0])


def test_feedback_is_off_without_eviction_share() -> None:
    memory = PolicyMemory()
    assert feedback(seen(9, 9), {"z": 1.0, "eviction_share": 0.0}, memory) is memory


def test_curve_uses_z_of_feedback() -> None:
    made, worker, forecasts = jobs(1), node(), table(certain(9))
    for share, z in ((0.05, 3.5), (0.0, 1.0)):
        asked = {"z": 1.0, "eviction_share": share}
        demand = demanded("curve", made, worker, forecasts, asked, numbers={Z: 3.5})
        assert isinstance(demand, CurveDemand)
        assert demand.z == z


def evicted_share(params: dict[str, float], endings: int, seed: int) -> float:
    """Simulate a worker with a queue that is never empty; return the share of evictions over the
    second half of the endings. Each request grows by 8 tokens between rounds. When memory runs
    out, the newest is evicted and becomes first in line. Lengths follow the forecast, up to 90."""
    rng = np.random.default_rng(seed)
    forecasts = table(from_lengths(range(1, 91), 100, "h"))
    asked = resolve("curve", FORMS["curve"].params, params)
    worker, memory = node(kv_tokens=2_000), PolicyMemory()
    runs: list[list[int]] = []  # output, length
    waits: list[list[int]] = []
    evictions = ended = early = 0
    for number in range(10**6):
        if ended >= endings:
            break
        early = evictions if 2 * ended < endings else early
        while len(waits) < 20:
            waits.append([0, int(rng.integers(1, 91))])
        rows = runs + waits
        count = len(rows)
        made = jobs(count, output=[row[0] for row in rows], forecast=np.zeros(count))
        running = np.arange(count) < len(runs)
        memory = feedback(seen(evictions, ended), asked, memory)
        queue = WorkerQueues.single(made, running, made.cap, worker, forecasts, memory.numbers)
        demand = FORMS["curve"].demand(queue, asked, np.random.default_rng(number))
        come = int(np.count_nonzero(fill_queue(running, demand, 999, alone=True).runs_next)) - len(
            runs
        )
        runs, waits = runs + waits[:come], waits[come:]
        runs = [[output + 8, length] for output, length in runs]
        ended += sum(output >= length for output, length in runs)
        runs = [row for row in runs if row[0] < row[1]]
        while sum(10 + output for output, _ in runs) > worker.kv_tokens:
            waits.insert(0, runs.pop())
            evictions += 1
    return (evictions - early) / (endings / 2)


@pytest.mark.parametrize("share", [0.02, 0.04])
@pytest.mark.parametrize("start", [0.0, 4.0])
def test_feedback_reaches_eviction_share(share: float, start: float) -> None:
    """From a z far too small or too large, the share is within a third over 2,000 endings. (At z =
    0 the share is 6 %, so larger shares are not reachable here.)"""
    found = evicted_share({"z": start, "eviction_share": share}, 4_000, 1)
    assert found == pytest.approx(share, rel=1 / 3)


def test_larger_z_evicts_less() -> None:
    shares = [evicted_share(FIXED_Z | {"z": z}, 1_500, 1) for z in (0.0, 1.0, 3.0)]
    assert shares[0] > 2 * shares[1] > 4 * shares[2]
