"""Queues that are filled together get the results of each queue filled alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.forecast import from_lengths
from services.policies.cadence import INTERVAL_S
from services.policies.form.demand import WorkerQueues
from services.policies.form.fill import FillResult, fill, fill_slots
from services.policies.form.lines import Lines
from services.policies.form.registry import FORMS
from services.policies.parameters import resolve
from services.policies.snapshot import Bools
from tests.examples import examples
from tests.policies.made_snapshots import jobs, node, table

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@pytest.mark.parametrize("held_fast", [False, True])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(40))
@given(SIZES, st.sampled_from([0.0, 0.3]), st.integers(0, 2**32))
def test_queues_filled_together_equal_each_filled_alone(
    form: str, held_fast: bool, sizes: list[int], interval_s: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    forecasts = table(*(from_lengths(rng.integers(1, 300, 12).tolist(), 400, "h") for _ in "abc"))
    cap, output = rng.integers(1, 400, count), rng.integers(0, 350, count)
    made = jobs(
        count, prompt=rng.integers(1, 200, count), output=output, cap=np.maximum(cap, output + 1),
        blocks=rng.integers(0, 20, count), forecast=rng.integers(0, 3, count),
        limit=output + rng.integers(0, 100, count),
        tpot_s=rng.choice([0.0173, 0.0311, np.inf], count),
    )  # fmt: skip
    limits = np.minimum(made.cap, output + rng.integers(1, 100, count))
    slots, alone = rng.integers(0, 50, len(sizes)), rng.random(len(sizes)) < 0.5
    workers = tuple(
        node(number, int(rng.integers(500, 9_000)), most, block_tokens=int(rng.choice([1, 16])))
        for number, most in enumerate(slots.tolist(), start=1)
    )
    runs, tables = rng.random(count) < rng.random(), (forecasts, {INTERVAL_S: interval_s})
    holds = runs | (rng.random(count) < 0.3)
    nth = np.concatenate([np.arange(size) for size in sizes])
    in_reach = held_fast | runs | (nth <= slots.repeat(sizes))
    shares = {"tpot_share": 0.8} if "tpot_share" in FORMS[form].params else {}
    params = resolve(form, FORMS[form].params, shares)

    def filled(queues: WorkerQueues, holds: Bools, which: slice) -> FillResult:
        demand, room = FORMS[form].demand(queues, params, draws), (slots[which], alone[which])
        if held_fast:
            return fill_slots(queues.lines, queues.is_running, holds, demand, *room)
        return fill(queues.lines, queues.is_running, demand, *room)

    columns = made.select(np.arange(count)), runs, limits
    draws = np.random.default_rng(seed)
    queues = WorkerQueues(*columns, workers, Lines.consecutive(np.array(sizes)), *tables, in_reach)
    together = filled(queues, holds, slice(None))
    draws, first = np.random.default_rng(seed), 0
    for which, (worker, size) in enumerate(zip(workers, sizes, strict=True)):
        part = slice(first, first + size)
        own = made.select(np.arange(first, first + size)), runs[part], limits[part]
        single = filled(
            WorkerQueues.single(*own, worker, *tables), holds[part], slice(which, which + 1)
        )
        found = together.select(np.arange(first, first + size))
        assert found.runs_next.tolist() == single.runs_next.tolist()
        assert found.reasons.tolist() == single.reasons.tolist()
        assert found.first_values == pytest.approx(single.first_values)
        assert found.second_values == pytest.approx(single.second_values)
        assert together.peaks[which] == pytest.approx(single.peaks[0])
        first += size
