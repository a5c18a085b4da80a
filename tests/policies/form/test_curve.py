"""The curve rule: by hand, against every future there is, and its feedback as a transcript."""

from collections.abc import Sequence
from itertools import product, takewhile
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.forecast import Forecast, Ints, certain, from_lengths
from services.policies.form.curve import LARGEST_Z, TIMES, Curve, Z, feedback
from services.policies.form.demand import WorkerQueue
from services.policies.form.fill import fill
from services.policies.form.peak import peak_tokens
from services.policies.form.registry import FORMS
from services.policies.memory import PolicyMemory
from services.policies.parameters import resolve
from services.policies.snapshot import RequestColumns, Snapshot
from tests.policies.made_snapshots import demanded, jobs, seat, table

FIXED_Z = {"eviction_share": 0.0}


def curve(
    made: RequestColumns,
    forecasts: Sequence[Forecast],
    z: float = 1.0,
    kv: int = 1_000,
    block: int = 1,
) -> Curve:
    worker = seat(kv_tokens=kv, block_tokens=block)
    demand = demanded("curve", made, worker, table(*forecasts), FIXED_Z | {"z": z})
    assert isinstance(demand, Curve)
    return demand


def needs(demand: Curve, base: int = 0) -> list[float]:
    """Of every prefix beyond the base."""
    count = len(demand.held)
    need = demand.longest(np.arange(count), base, count - base)[1]
    return [need(k) for k in range(count - base + 1)]


TWO_OR_SIX = Forecast((2.0, 6.0), (0.5, 0.5), 6)


def test_two_that_make_two_tokens_or_six_by_hand() -> None:
    """Prompts of 10. Now they hold 10 each; while they make their 1st and 2nd token, 11 and 12;
    then half of the time nothing, half of the time 13 … 16.

    One: at 2, E = 12 and sd = 0; at 6, E = 8 and sd = √(16² · ½ · ½) = 8. With z = 1 the top is
    16, with z = 0 it is 12. Two: at 2, 24; at 6, 16 + z · √(2 · 64) = 16 + 11.31 z.
    """
    made = jobs(2, prompt=[10, 10], cap=[6, 6])
    assert needs(curve(made, [TWO_OR_SIX])) == pytest.approx([0, 16, 16 + sqrt(128)])
    assert needs(curve(made, [TWO_OR_SIX], z=0)) == pytest.approx([0, 12, 24])
    assert needs(curve(made, [TWO_OR_SIX], z=0.5), 1) == pytest.approx([12, 24])
    assert needs(curve(made, [TWO_OR_SIX], z=2)) == pytest.approx([0, 24, 16 + 2 * sqrt(128)])


def test_whoever_has_outlived_two_tokens_makes_six() -> None:
    """After 2 tokens, 4 more are certain: 10 + 2 + 4. Beyond its forecast, its cap is; past its
    cap, nothing more comes."""
    made = jobs(1, prompt=[10], output=[2], cap=[9])
    assert needs(curve(made, [TWO_OR_SIX])) == [0, 16]
    assert needs(curve(jobs(1, prompt=[10], output=[6], cap=[9]), [TWO_OR_SIX])) == [0, 19]
    assert needs(curve(jobs(1, prompt=[10], output=[9], cap=[9]), [TWO_OR_SIX])) == [0, 19]
    assert needs(curve(jobs(1, prompt=[10], cap=[4]), [TWO_OR_SIX])) == pytest.approx([0, 14])


def test_blocks_are_given_whole() -> None:
    """10 + 6 tokens are one block of 16; 11 + 6 are two, and one that holds three has three."""
    one = {"prompt": [10], "cap": [6]}
    assert needs(curve(jobs(1, **one), [certain(6)], block=16)) == [0, 16]
    assert needs(curve(jobs(1, prompt=[11], cap=[6]), [certain(6)], block=16)) == [0, 32]
    assert needs(curve(jobs(1, **one, blocks=[3]), [certain(6)], block=16)) == [0, 48]


def test_what_is_reserved_is_not_planned() -> None:
    demand = demanded("curve", jobs(1), seat(kv_tokens=200), table(certain(9)), {"reserved": 0.1})
    assert demand.limit == 180


# Against every future there is

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True)
few = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), lengths), min_size=1, max_size=4)


def forecast_of(support: Sequence[int]) -> Forecast:
    return from_lengths(support, 9, "h")


@settings(max_examples=150)
@given(few, st.sampled_from([0.0, 1.0, 2.5]))
def test_the_curve_is_that_of_all_futures_enumerated(
    rows: list[tuple[int, int, list[int]]], z: float
) -> None:
    """Mean and deviation of the tokens held at each time, over the product of all lengths."""
    ends = [
        [length - g for length in sorted(support) if length > g] or [max(0, 9 - g)]
        for _, g, support in rows
    ]
    made = jobs(
        len(rows),
        prompt=[p for p, _, _ in rows],
        output=[g for _, g, _ in rows],
        cap=[9] * len(rows),
        forecast=range(len(rows)),
    )
    found = needs(curve(made, [forecast_of(support) for *_, support in rows], z))

    def top(first: int) -> float:
        tops = [float(sum(p + g for p, g, _ in rows[:first]))]
        for t in range(1, 10):
            futures = [
                sum(
                    p + g + t if end >= t else 0
                    for end, (p, g, _) in zip(future, rows, strict=False)
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
def test_with_certain_lengths_its_top_is_past_futures_peak(
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
def test_the_longest_prefix_is_what_a_scan_finds_and_needs_rise(
    count: int, z: float, seed: int, kv: int, block: int, data: st.DataObject
) -> None:
    """Of any order of some of a line; and of who could be added alone."""
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
    means, variances = demand.moments
    assert len(means) <= TIMES + 1
    order = rng.permutation(count)[: data.draw(st.integers(0, count))]
    base = data.draw(st.integers(0, len(order)))
    most = data.draw(st.integers(0, len(order) - base))

    def need(rows: Ints) -> float:
        mean = sum((means[:, row] for row in rows), np.zeros(len(means)))
        variance = sum((variances[:, row] for row in rows), np.zeros(len(means)))
        return float(np.max(mean + z * np.sqrt(variance)))

    def fits(rows: Ints) -> bool:
        return need(rows) <= demand.limit

    more, told = demand.longest(order, base, most)
    assert more == len(list(takewhile(lambda k: fits(order[: base + k]), range(1, most + 1))))
    asked = range(min(most, more + 1) + 1)
    assert [told(k) for k in asked] == pytest.approx([need(order[: base + k]) for k in asked])
    assert [told(k) for k in asked] == sorted(told(k) for k in asked)
    kept, later = order[:base], order[base:]
    expected = [fits(np.append(kept, row)) for row in later]
    assert demand.able(kept, later).tolist() == expected


# Feedback


def seen(evictions: int, endings: int, waiting: int = 1) -> Snapshot:
    made, nobody = jobs(waiting), np.arange(0)
    return Snapshot(
        0.0, made, np.arange(waiting), nobody, (), table(), evictions=evictions, endings=endings
    )


def test_feedback_as_a_transcript() -> None:
    """Every eviction is 0.1 up, every ending 0.1 · 0.05 = 0.005 down; nothing counts twice."""
    given_params = {"z": 1.0, "reserved": 0.0, "eviction_share": 0.05}
    memory, zs = PolicyMemory(), []
    for evictions, endings in [(0, 0), (1, 0), (1, 20), (1, 20), (4, 40), (99, 40), (99, 4_000)]:
        memory = feedback(seen(evictions, endings), given_params, memory)
        zs.append(memory.number(Z, -1.0))
    assert zs == pytest.approx([-1.0, 1.1, 1.0, 1.0, 1.2, LARGEST_Z, 0.0])


def test_what_ends_while_nobody_waits_lowers_no_z() -> None:
    """1,000 endings are seen, and left out; the next 20 are 0.1 down, and an eviction counts."""
    given_params = {"z": 1.0, "reserved": 0.0, "eviction_share": 0.05}
    memory, zs = PolicyMemory(), []
    for evictions, endings, waiting in [(0, 1_000, 0), (0, 1_020, 1), (1, 1_020, 0)]:
        memory = feedback(seen(evictions, endings, waiting), given_params, memory)
        zs.append(memory.number(Z))
    assert zs == pytest.approx([1.0, 0.9, 1.0])


def test_asked_for_no_share_z_stays_what_it_is() -> None:
    memory = PolicyMemory()
    assert feedback(seen(9, 9), {"z": 1.0, "eviction_share": 0.0}, memory) is memory


def test_the_curve_uses_the_z_that_feedback_found() -> None:
    made, worker, forecasts = jobs(1), seat(), table(certain(9))
    for share, z in ((0.05, 3.5), (0.0, 1.0)):
        asked = {"z": 1.0, "eviction_share": share}
        demand = demanded("curve", made, worker, forecasts, asked, numbers={Z: 3.5})
        assert isinstance(demand, Curve)
        assert demand.z == z


def evicted_share(params: dict[str, float], endings: int, seed: int) -> float:
    """A worker that always has somebody waiting: everybody grows by 8 tokens between rounds, the
    newest is evicted when memory runs out, and comes first again. Lengths are as foreseen, up to
    90. Of the second half of the endings."""
    rng = np.random.default_rng(seed)
    forecasts = table(from_lengths(range(1, 91), 100, "h"))
    asked = resolve("curve", FORMS["curve"].params, params)
    worker, memory = seat(kv_tokens=2_000), PolicyMemory()
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
        queue = WorkerQueue(made, running, made.cap, worker, forecasts, memory.numbers)
        demand = FORMS["curve"].demand(queue, asked, np.random.default_rng(number))
        come = int(np.count_nonzero(fill(running, demand, 999, alone=True).run)) - len(runs)
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
def test_evictions_come_to_the_share_asked_for(share: float, start: float) -> None:
    """From a z that is far too small or too large: within a third of it over 2,000 endings. (More
    than 6 % are not to be had here: so many there are at z = 0.)"""
    found = evicted_share({"z": start, "eviction_share": share}, 4_000, 1)
    assert found == pytest.approx(share, rel=1 / 3)


def test_a_larger_z_evicts_less() -> None:
    shares = [evicted_share(FIXED_Z | {"z": z}, 1_500, 1) for z in (0.0, 1.0, 3.0)]
    assert shares[0] > 2 * shares[1] > 4 * shares[2]
