"""Properties of every row of presets.toml over many rounds, on workers with little memory."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from services.policies.decide import takes_turns
from services.policies.decision import WaitReason, WorkerDecision
from services.policies.interval import MAX_INTERVAL_S
from services.policies.order.registry import ORDERS
from services.policies.parameters import Params
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import Preset, choose, presets
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, RequestColumns, WorkerSnapshot
from services.scheduler.core.turns import MOST_WORKERS
from tests.examples import examples
from tests.policies.explanations import explanation
from tests.scheduler.load.scheduler_load import Ask, Load
from tests.scheduler.load.watched_fleet import REQUESTS, Fleet, Seen, due_within

ALL = list(presets())
SMALL = {"slice_tokens": 8, "interval_s": 0.1}  # for outputs of about 20 tokens

# Reasons to wait for a worker or for the batch interval.
BY_RULE = {
    WaitReason[name]
    for name in ("ASSIGNED", "CUT_SCHEDULED", "IN_BATCH", "CUT_ON_IDLE")
    if name in WaitReason.__members__
}

# Places that give a worker its turn, whether or not it has room and another is idle.
BY_TURN = {name for name, place in PLACEMENTS.items() if place.by_turn}

# Forms that count memory from a worker's next plan, which comes late where workers take turns.
FROM_NEXT_PLAN = {"curve"}

# Forms that never overcommit memory: no request is ever evicted.
HOLDS: dict[str, Callable[[Params], bool]] = {
    "conservative": lambda params: params["overcommit"] <= 1,
    "fixed": lambda _: True,
    "dp": lambda _: True,
}


def small(name: str) -> Preset:
    takes = presets()[name].known_params()
    return choose(name, {key: value for key, value in SMALL.items() if key in takes})


def holds(preset: Preset) -> bool:
    return preset.form in HOLDS and HOLDS[preset.form](preset.params)


@pytest.mark.parametrize("name", ALL)
@settings(
    max_examples=examples(3),
    phases=(
        Phase.explicit,
        Phase.reuse,
        Phase.generate,
    ),  # a smaller seed does not give a simpler load
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32))
def test_preset_properties_hold_through_many_rounds(name: str, seed: int) -> None:
    """Every round is also decided from copies, and by a batcher behind the codec: watched_fleet."""
    check_run(small(name), seed)


@pytest.mark.parametrize("name", [name for name in ALL if takes_turns(presets()[name])])
@settings(max_examples=examples(1), suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_preset_properties_hold_where_workers_take_turns(name: str, seed: int) -> None:
    check_run(small(name), seed, turn=1 + seed % 2)  # of at most three workers


def check_run(preset: Preset, seed: int, turn: int = MOST_WORKERS) -> None:
    fleet = Fleet(preset, seed, turn)
    seen = fleet.run()
    assert fleet.ended == len(fleet.lives) == REQUESTS
    assert all(life.made == life.length for life in fleet.lives.values())
    assert len(seen) == fleet.rounds.count > REQUESTS / 8
    for each in seen:
        check(preset, each)
    assert fleet.evictions == 0 or not holds(preset)


def check(preset: Preset, seen: Seen) -> None:
    running = set(seen.snapshot.running.tolist())
    runs = [row for share in seen.decision.workers for row in share.run.tolist()]
    assert len(set(runs)) == len(runs)
    assert set(runs) <= running | set(seen.snapshot.queued.tolist())
    for worker, share in zip(seen.snapshot.deciding, seen.decision.workers, strict=True):
        here = {row for row in running if seen.snapshot.jobs.home[row] == worker.number}
        check_pauses(preset, seen.snapshot.jobs, here, share)
        if not (seen.snapshot.turn and preset.form in FROM_NEXT_PLAN):
            check_room(preset, seen.snapshot.jobs, worker, here, share)
        if not here and not len(share.run):
            check_idle(preset, seen, worker, set(runs))
    check_reasons(seen)


def check_pauses(
    preset: Preset, jobs: RequestColumns, here: set[int], share: WorkerDecision
) -> None:
    """Pauses only running requests, to make room for others or because their slice is exhausted."""
    paused = set(share.pause.tolist())
    assert paused <= here and not paused & set(share.run.tolist())
    if SLICES[preset.slice].returns:
        paused -= {row for row in paused if jobs.slice_exhausted[row]}
    assert not paused or set(share.run.tolist()) - here


def check_room(
    preset: Preset,
    jobs: RequestColumns,
    worker: WorkerSnapshot,
    here: set[int],
    share: WorkerDecision,
) -> None:
    """An admitted request fits beside the current contexts, and with a safe form beside all
    that is granted."""
    assert len(share.run) <= worker.max_running
    if len(share.run) < 2 or not set(share.run.tolist()) - here:
        return
    context = worker.whole_blocks(jobs.context[share.run])
    granted = worker.whole_blocks(jobs.prompt[share.run] + share.limits)
    room = worker.room_tokens
    assert np.sum(context) <= room
    assert not holds(preset) or np.sum(granted) <= room


def check_idle(preset: Preset, seen: Seen, worker: WorkerSnapshot, runs: set[int]) -> None:
    """No request waits that an idle worker could run, except by a preset rule, and then not for
    ever: a running request will end, or the next round has a time."""
    jobs = seen.snapshot.jobs
    able = [
        row
        for row in seen.snapshot.queued.tolist()
        if row not in runs and could_run(jobs, row, worker) and worker.max_running
    ]
    if not able or preset.place in BY_TURN:
        return
    outcome = {row: explanation(seen.decision.explanations, row) for row in able}
    assert preset.arrangement == "batch" and all(
        why and why.reason in BY_RULE for why in outcome.values()
    )
    soon = due_within(seen.decision, seen.snapshot.now, MAX_INTERVAL_S)
    assert runs or soon or seen.decision.not_before_s <= seen.snapshot.now + MAX_INTERVAL_S


def could_run(jobs: RequestColumns, row: int, worker: WorkerSnapshot) -> bool:
    rests = jobs.home[row] != NOWHERE and jobs.held[row] > 0
    if rests:
        return bool(jobs.home[row] == worker.number)
    reach = int(jobs.prompt[row] + jobs.cap[row])
    return bool(jobs.model[row] == worker.model) and reach <= worker.reach_tokens


def check_reasons(seen: Seen) -> None:
    """Every considered request has an explanation with consistent numbers."""
    why = seen.decision.explanations
    runs = {row for share in seen.decision.workers for row in share.run.tolist()}
    running = set(seen.snapshot.running.tolist())
    assert len(set(why.rows.tolist())) == len(why.rows)
    assert set(why.rows.tolist()) == set(seen.candidates.rows.tolist()) - running
    of = {reason: why.rows[why.reasons == reason] for reason in WaitReason}
    assert set(of[WaitReason.ADMITTED].tolist()) == runs - running
    memory, places = why.reasons == WaitReason.MEMORY, why.reasons == WaitReason.SLOTS
    assert (why.first_values[memory] > why.second_values[memory]).all()
    assert (why.first_values[places] >= why.second_values[places]).all()


# Starvation bounds

AGEING_S = 0.5
SHORT_S = 14.0  # short requests arrive faster than they can be served for this long
SERVED_S = 2.0  # until the requests ahead are served and the waiting one has its turn
Bound = Callable[[Params], float]

# The order's declared bound on a long request's wait: seconds beyond SERVED_S, or None
# where it makes no promise. A new order must say.
BOUNDS: dict[str, Bound | None] = {
    "arrival": lambda _: 0.0,
    "fifo": None,  # after every slice, behind requests that arrived meanwhile
    "alise": lambda params: params["levels"] * params["ageing_s"],
    "srtf": lambda params: params["ageing_s"],
    "gittins": lambda params: params["ageing_s"],
    "tail": lambda params: params["ageing_s"],
    "mlfq": lambda params: params["ageing_s"],
    "rank": None,  # a bound in quanta of those promoted before, not in seconds
    "hrrn": None,
    "edf": None,
    "slack": None,
    "boost": None,  # bounded in the time to serve the backlog, which grows here
    "uniboost": None,  # bounded by the largest boost of the present γ: test_uniboost.py
}


def test_every_order_declares_starvation_bound() -> None:
    unsaid = set(ORDERS) - set(BOUNDS)
    assert not unsaid, f"put these into BOUNDS, with what their docstrings promise: {unsaid}"


@cache
def crowd() -> tuple[Ask, ...]:
    """A long request arrives early; the short ones exceed the capacity."""
    long = Ask("long", 0.05, 50, 500, 500)
    return (long, *(Ask(f"s{i}", i * 0.045, 50, 20, 20) for i in range(round(SHORT_S / 0.045))))


@pytest.mark.parametrize("name", ALL)
def test_long_request_does_not_starve(name: str) -> None:
    preset = choose(name)
    bound = BOUNDS[preset.order]
    if bound is None or preset.arrangement != "continuous":
        pytest.skip(f"{preset.order} in {preset.arrangement} promises nothing")
    ageing = {"ageing_s": AGEING_S} if "ageing_s" in preset.known_params() else {}
    load = Load(name, list(crowd()), 600, places=8, **ageing)
    outcome = load.run()
    assert outcome.longest_away_s["long"] < bound(load.state.preset.params) + SERVED_S


# Open batches take any request that fits, so an earlier one may be in a later batch.
IN_ORDER = [
    name
    for name in ALL
    if choose(name).order == "arrival" and choose(name).form not in ("wma", "dp")
]


@pytest.mark.parametrize("name", IN_ORDER)
def test_first_come_first_served(name: str) -> None:
    """On one worker, first tokens come in order of arrival."""
    asks = crowd()[:200]
    outcome = Load(name, list(asks), 600, places=8).run()
    first = [outcome.first_s[ask.name] for ask in sorted(asks, key=lambda ask: ask.arrival_s)]
    assert first == sorted(first)
