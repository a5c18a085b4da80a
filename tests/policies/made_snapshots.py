"""Generated snapshots for policy tests; unspecified columns have plain defaults."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecast import Floats, Forecast, Ints, certain, from_lengths
from services.forecasttable import ForecastTable
from services.policies.form.demand import Demand, WorkerQueues
from services.policies.form.fill import FillResult, fill
from services.policies.form.lines import Lines
from services.policies.form.registry import FORMS
from services.policies.memory import PolicyMemory
from services.policies.order.ranking import Ranking
from services.policies.parameters import resolve
from services.policies.snapshot import (
    FLOATS,
    NOWHERE,
    Bools,
    Candidates,
    RequestColumns,
    Snapshot,
    WorkerSnapshot,
)

COST = CostModel(0.01, 0.0001, 0.001, 0.0)
Row = tuple[int, int, int]  # prompt, generated, true length (= max_tokens)


def node(
    number: int = 1,
    kv_tokens: int = 1_000,
    places: int = 99,
    *,
    model: int = 0,
    block_tokens: int = 1,
    reach_tokens: int | None = None,
    shared_blocks: int = 0,
    prefixes: Sequence[int] = (),
    cost: CostModel = COST,
    adapter_slots: int = 0,
    adapter_turn_steps: int = 0,
) -> WorkerSnapshot:
    reach = kv_tokens if reach_tokens is None else reach_tokens
    cached = np.array(sorted(prefixes), np.int64)
    return WorkerSnapshot(
        number,
        model,
        kv_tokens,
        block_tokens,
        places,
        reach,
        cost,
        shared_blocks,
        cached,
        adapter_slots,
        adapter_turn_steps,
    )


def jobs(count: int, **columns: Sequence[float] | Ints | Floats) -> RequestColumns:
    """Return `count` requests with read-only columns."""
    plain: dict[str, Sequence[float] | Ints | Floats] = {
        "serial": np.arange(1, count + 1),
        "home": np.full(count, NOWHERE),
        "prompt": np.full(count, 10),
        "cap": np.full(count, 100),
        "total": np.full(count, 50.0),
        "deadline_s": np.full(count, np.inf),
        "ttft_s": np.full(count, np.inf),
        "tpot_s": np.full(count, np.inf),
        "mtpot_s": np.full(count, np.inf),
        "first_s": np.full(count, np.inf),
        "weight": np.ones(count),
    }
    made = []
    for each in fields(RequestColumns):
        values = (plain | columns).get(each.name, np.zeros(count))
        column = np.array(values, float if each.name in FLOATS else np.int64)
        assert len(column) == count
        column.flags.writeable = False
        made.append(column)
    return RequestColumns(*made)


def candidates(
    of: RequestColumns,
    runs: Sequence[bool],
    *workers: WorkerSnapshot,
    number: int = 1,
    now: float = 0.0,
) -> Candidates:
    """Candidates with their positions as keys; running requests are not preempted."""
    key = np.arange(len(of), dtype=float)
    running = np.array(runs, bool)
    line = np.where(running, -np.inf, key)
    return Candidates(number, now, np.arange(len(of)), running, key, line, of, workers)


def ranking(snapshot: Snapshot, key: Floats) -> Ranking:
    """A ranking of the snapshot's queued and running requests, in that order."""
    rows = np.concatenate([snapshot.queued, snapshot.running])
    nothing = np.zeros(len(rows))
    split = len(snapshot.queued)
    return Ranking(rows, split, key, key, nothing, nothing, np.inf, PolicyMemory())


def table(*forecasts: Forecast) -> ForecastTable:
    made = ForecastTable(2)
    for forecast in forecasts:
        made.intern(forecast)
    return made


def demanded(
    form: str,
    made: RequestColumns,
    worker: WorkerSnapshot,
    forecasts: ForecastTable,
    params: Mapping[str, float],
    seed: int = 0,
    runs: Sequence[bool] | Bools | None = None,
    numbers: Mapping[str, float] | None = None,
    limits: Sequence[int] | Ints | None = None,
) -> Demand:
    """Return the demand of a worker queue; by default no request runs and slices are whole."""
    running = np.zeros(len(made), bool) if runs is None else np.array(runs, bool)
    granted = made.cap if limits is None else np.array(limits, np.int64)
    queue = WorkerQueues.single(made, running, granted, worker, forecasts, numbers or {})
    given = resolve(form, FORMS[form].params, params)
    return FORMS[form].demand(queue, given, np.random.default_rng(seed))


def line(order: Sequence[int] | Ints) -> Lines:
    """Return jobs of a single queue in this order."""
    jobs = np.array(order, np.int64)
    return Lines(jobs, np.zeros(len(jobs), np.int64), np.array([len(jobs)]))


def fill_queue(runs: Bools, demand: Demand, slots: int, alone: bool) -> FillResult:
    """Return the result of filling a single queue."""
    return fill(line(range(len(runs))), runs, demand, np.array([slots]), np.array([alone]))


def count_fitting(
    demand: Demand, order: Sequence[int] | Ints, base: int, most: int
) -> tuple[int, Callable[[int], float]]:
    """Return how many jobs of a single queue fit, and the need of each number of them."""
    fits, need = demand.count_fitting(line(order), np.array([base]), np.array([most]))
    return int(fits[0]), lambda count: float(need(np.array([count]))[0])


def formed(
    form: str,
    kv_tokens: int,
    running: Sequence[Row],
    queued: Sequence[Row],
    params: Mapping[str, float] | None = None,
    most: int = 99,
    seed: int = 0,
    tpot_s: float = np.inf,
) -> tuple[int, FillResult]:
    """Return the number of admitted requests and the whole result; all lengths are certain."""
    rows = [*running, *queued]
    forecasts = table(*(certain(length) for _, _, length in rows))
    prompt, output, cap = np.array(rows, np.int64).reshape(-1, 3).T
    runs = np.arange(len(rows)) < len(running)
    granted = np.where(runs, cap, 0)
    made = jobs(
        len(rows),
        prompt=prompt,
        output=output,
        cap=cap,
        limit=granted,
        forecast=np.arange(len(rows)),
        tpot_s=np.full(len(rows), tpot_s),
    )
    worker = node(kv_tokens=kv_tokens, places=most)
    demand = demanded(form, made, worker, forecasts, params or {}, seed, runs)
    alone = bool(queued) and queued[0][0] + queued[0][2] <= kv_tokens
    filled = fill_queue(runs, demand, most, alone)
    assert filled.runs_next[: len(running)].all()
    return int(np.count_nonzero(filled.runs_next)) - len(running), filled


@st.composite
def snapshots(draw: st.DrawFn, adapters: bool = False) -> Snapshot:
    """Random snapshots with free rows, several workers and models, and waiting, running and paused
    requests; running requests respect the slots of their worker. Columns are read-only. With
    `adapters`, workers have few slots for them."""
    kinds = st.tuples(
        st.sampled_from([64, 200, 1_000]), st.integers(1, 4), st.integers(0, 1),
        st.sampled_from([1, 16]), st.booleans(), st.integers(0, 2 * adapters),
    )  # fmt: skip
    workers = tuple(
        node(
            number,
            kv,
            places,
            model=model,
            block_tokens=block,
            reach_tokens=kv // (1 + narrow),
            adapter_slots=slots,
            adapter_turn_steps=1_000,
        )
        for number, (kv, places, model, block, narrow, slots) in enumerate(
            draw(st.lists(kinds, min_size=1, max_size=3)), 1
        )
    )
    count = draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    forecasts = table(certain(5), certain(60), from_lengths([3, 9, 40, 41], 500, "h"))
    prompt, output = rng.integers(1, 60, count), rng.integers(0, 30, count)
    cap = output + rng.integers(1, 60, count)
    which, model = rng.integers(0, 3, count), rng.integers(0, 2, count)
    home, held, phase = np.full(count, NOWHERE), np.zeros(count, np.int64), np.zeros(count)
    for row in range(count):
        able = [
            w for w in workers
            if w.model == model[row] and prompt[row] + cap[row] <= w.reach_tokens
        ]  # fmt: skip
        phase[row] = rng.choice([0, 1, 1, 2, 3])  # free, waiting, running, paused
        if phase[row] == 2:
            able = [w for w in able if np.sum((home == w.number) & (phase == 2)) < w.max_running]
        if phase[row] >= 2 and able:
            home[row], held[row] = able[0].number, prompt[row] + output[row]
        elif phase[row] >= 2:
            phase[row] = 1
    waited_s = rng.choice([0.0, 1.0, 11.0, 95.0], count)
    runs = phase == 2
    made = jobs(
        count,
        serial=rng.permutation(count) + 1,
        model=model,
        home=home,
        prompt=prompt,
        output=output,
        held=held,
        blocks=np.where(runs, -(-held // 16), 0),
        limit=np.where(runs, np.minimum(cap, output + rng.integers(0, 20, count)), 0),
        cap=cap,
        admitted=rng.permutation(count),
        preemptions=rng.integers(0, 2, count),
        forecast=which,
        total=forecasts.mean(which, output, cap),
        arrival_s=100.0 - waited_s,
        since_s=100.0 - waited_s,
        adapter=rng.integers(0, 4, count) * adapters,
    )
    queued = np.flatnonzero((phase == 1) | (phase == 3))
    return Snapshot(100.0, made, queued, np.flatnonzero(runs), workers, forecasts)
