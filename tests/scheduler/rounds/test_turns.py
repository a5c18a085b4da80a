"""Which workers a round decides about: those with news, those with free memory, and the others in
turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import Completion, FinishReason, Report, Request, WorkerView
from services.costs import CostModel
from services.forecast import certain
from services.policies.preset import choose
from services.policies.snapshot import WorkerSnapshot
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.turns import MOST_WORKERS, Turns

COST = CostModel(0.01, 1e-4, 1e-4, 0.0)
FLEET = 3 * MOST_WORKERS


def snapshots(*numbers: int) -> tuple[WorkerSnapshot, ...]:
    return tuple(WorkerSnapshot(number, 0, 1_000, 10, 4, 1_000, COST) for number in numbers)


def taken(turns: Turns, *numbers: int, free: dict[int, float] | None = None) -> list[int]:
    shares = free or {}
    workers = turns.take(snapshots(*numbers), lambda number: shares.get(number, 0.0))
    return [worker.number for worker in workers]


def test_small_fleet_is_decided_as_a_whole():
    turns = Turns(3)
    turns.note(2)
    assert taken(turns, 1, 2, 3) == [1, 2, 3]
    assert not turns.pending


def test_workers_with_news_come_in_the_order_of_their_news():
    turns = Turns(2)
    for number in (5, 3, 4, 5):
        turns.note(number)
    assert taken(turns, 1, 2, 3, 4, 5) == [3, 5]
    assert turns.pending
    assert taken(turns, 1, 2, 3, 4, 5) == [4]
    assert not turns.pending


def test_changed_queue_concerns_each_worker_once_the_freest_and_those_that_wait_longest_first():
    turns, fleet = Turns(4), (1, 2, 3, 4, 5, 6, 7, 8, 9)
    free = {8: 0.9, 7: 0.8, 6: 0.7}
    turns.note_all()
    assert taken(turns, *fleet, free=free) == [1, 2, 7, 8]
    turns.note_all()  # 1, 2, 7 and 8 are due again, after the others
    assert taken(turns, *fleet, free=free) == [3, 4, 7, 8]
    assert taken(turns, *fleet, free=free) == [1, 5, 6, 9]
    assert taken(turns, *fleet, free=free) == [2]
    assert not turns.pending


def test_news_leave_places_to_workers_without():
    turns, fleet = Turns(4), (1, 2, 3, 4, 5, 6, 7, 8, 9)
    turns.note_all()
    for number in (1, 2, 3, 4):
        turns.note(number)
    assert taken(turns, *fleet, free={9: 1.0}) == [1, 2, 3, 9]
    turns.forget_queue()
    assert taken(turns, *fleet) == [4]
    assert not turns.pending


def test_worker_that_is_gone_has_no_turn():
    turns = Turns(1)
    turns.note(7)
    turns.note(8)
    assert taken(turns, 1, 8) == [8]
    assert not turns.pending


def test_round_without_a_reason_takes_the_next_workers():
    assert taken(Turns(2), 1, 2, 3) == [1, 2]


@given(st.lists(st.one_of(st.none(), st.integers(0, 19), st.just("take")), max_size=60))
def test_every_worker_that_is_due_has_its_turn(steps: list[object]):
    """Against a set of due workers: a turn takes only these, as many as it may, and all have had
    theirs after as many rounds as they need."""
    turns, due = Turns(4), set[int]()
    for step in steps:
        match step:
            case "take" if turns.pending:
                now = taken(turns, *range(20))
                assert len(now) == min(4, len(due)) and set(now) <= due
                due -= set(now)
            case int():
                turns.note(step)
                due.add(step)
            case None:
                turns.note_all()
                due = set(range(20))
        assert turns.pending == bool(due)
    rounds = 0
    while turns.pending:
        due -= set(taken(turns, *range(20)))
        rounds += 1
    assert not due and rounds <= 5


# Rounds of a whole state


def fleet(policy: str = "foretoken", workers: int = FLEET, slots: int = 2) -> SchedulerState:
    state = SchedulerState(choose(policy))
    for number in range(workers):
        name = f"w{number}"
        view = WorkerView(name, name, "demo", slots * 320, 16, slots, 160)
        state.step(ev.WorkerAttached(f"{name}#1", view), 0.0)
        state.step(ev.Costed(name, COST), 0.0)
    rounds(state, 0.0)
    return state


def submit(state: SchedulerState, count: int, now: float, prefix: tuple[int, ...] = ()) -> None:
    for _ in range(count):
        name = f"r{len(state.jobs)}"
        request = Request(name, "demo", 60, 100, now, prefix_hashes=prefix)
        state.step(ev.Submitted("gateway#1", request), now)
        state.step(ev.Forecasted(((name, certain(100)),)), now)


def rounds(state: SchedulerState, now: float) -> list[int]:
    """Runs all rounds that are due; the number of workers that each decides about."""
    counts = []
    while state.round_due_s <= now:
        state.step(ev.Round(), now)
        counts.append(len(state.rounds.decision.workers))
    return counts


@pytest.mark.parametrize("policy", ["foretoken", "fcfs", "past-future", "alise", "mlfq"])
def test_rounds_of_a_large_fleet_fill_every_worker(policy: str):
    state = fleet(policy)
    submit(state, 3 * FLEET, 1.0)
    assert rounds(state, 1.0) == [MOST_WORKERS] * 3
    assert [len(worker.running) for worker in state.workers.values()] == [2] * FLEET
    assert state.ledger.waiting == FLEET


def test_report_of_one_worker_makes_one_small_round():
    state = fleet()
    submit(state, 3 * FLEET, 1.0)
    rounds(state, 1.0)
    ended = next(iter(state.workers["w20"].running))
    worker = state.workers["w20"]
    done = Report(1, worker.plan_seq, finished=(Completion(ended, 100, FinishReason.STOP),))
    state.step(ev.Reported("w20#1", "w20", done), 2.0)
    assert rounds(state, 2.0) == [1]
    assert len(worker.running) == 2


def test_empty_queue_needs_no_further_rounds():
    state = fleet()
    submit(state, 1, 1.0)
    assert rounds(state, 1.0) == [MOST_WORKERS]
    assert state.ledger.running == 1


def test_batches_are_divided_among_all_workers_at_once():
    state = fleet("scls")
    submit(state, FLEET, 1.0)
    assert set(rounds(state, 10.0)) == {FLEET}


def test_new_request_meets_its_cached_prefix_in_its_first_round():
    state = fleet()
    assert rounds(state, 0.0) == []
    holder = state.workers["w13"]
    cached = Report(1, 0, prefixes_added=(11, 12, 13), free_blocks=20)
    state.step(ev.Reported("w13#1", "w13", cached), 0.5)
    rounds(state, 0.5)
    submit(state, 1, 1.0, prefix=(11, 12, 13))
    state.step(ev.Round(), 1.0)
    assert len(holder.running) == 1


def test_change_while_the_batcher_arranges_is_not_forgotten():
    """A worker begins to drain. Its request moves in the next round, although none waits now."""
    state = SchedulerState(choose("foretoken"), apart=True)

    def begin_round(worker: str, now: float) -> int:
        view = WorkerView(worker, worker, "demo", 640, 16, 4, 160)
        state.step(ev.WorkerAttached(f"{worker}#1", view), now)
        submit(state, 1, now)
        [asked] = state.step(ev.Round(), now)
        assert isinstance(asked, ev.AskArrange)
        return asked.round

    state.step(ev.Arranged(begin_round("w0", 1.0), None), 1.0)
    number = begin_round("w1", 2.0)
    state.step(ev.WorkerDraining("w0#1", "w0", 10.0), 2.1)
    state.step(ev.Arranged(number, None), 2.2)
    assert [len(worker.running) for worker in state.workers.values()] == [1, 1]
    assert state.round_due_s <= 2.2
