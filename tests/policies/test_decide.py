"""Properties of every row of presets.toml on random snapshots."""

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.policies.arrange.batch_placement import BATCH_PLACEMENTS
from services.policies.decide import decide
from services.policies.decision import EXPLANATIONS, Decision, WaitExplanations, WaitReason
from services.policies.form.registry import FORMS
from services.policies.interval import INTERVALS
from services.policies.memory import PolicyMemory
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import Preset, choose, presets
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, Snapshot
from tests.examples import examples
from tests.policies.explanations import explanation
from tests.policies.made_snapshots import jobs, node, snapshots, table

ALL = sorted(presets())


def frozen(memory: PolicyMemory) -> PolicyMemory:
    """Make all columns of the memory read-only."""
    for columns in (memory.ranks, memory.notes):
        for column in (columns.serials, *columns.values.values()):
            column.flags.writeable = False
    return memory


def decided(snapshot: Snapshot, preset: str, memory: PolicyMemory, seed: int) -> Decision:
    return decide(snapshot, choose(preset), frozen(memory), np.random.default_rng(seed), 7)


def could_run(snapshot: Snapshot, row: int, number: int, stays: bool) -> bool:
    """Whether the worker, if idle, could take the request; with `stays`, a paused one only at
    home."""
    jobs = snapshot.jobs
    worker = next(w for w in snapshot.workers if w.number == number)
    rests = jobs.home[row] != NOWHERE and jobs.held[row] > 0
    reach = int(jobs.prompt[row] + jobs.cap[row])
    fits = bool(jobs.model[row] == worker.model) and reach <= worker.reach_tokens
    return int(jobs.home[row]) == number if rests and stays else fits


def conserves(preset: Preset) -> bool:
    """Whether the preset keeps no worker idle while a request waits that it could take. Exceptions
    are batches that wait for one worker, for their interval (SCLS, §4.5, 4.6) or for
    returning requests, and placement in turns: the turn may fall on a full worker, and the next
    round begins with another."""
    if preset.arrangement == "continuous":
        return not PLACEMENTS[preset.place].by_turn
    waits = BATCH_PLACEMENTS[preset.place].assign or INTERVALS[preset.interval].ahead
    return not (waits or SLICES[preset.slice].returns)


def check(snapshot: Snapshot, decision: Decision, preset: Preset) -> None:
    stays = preset.arrangement == "continuous"
    jobs, running = snapshot.jobs, set(snapshot.running.tolist())
    queued = set(snapshot.queued.tolist())
    assert [share.worker for share in decision.workers] == [w.number for w in snapshot.workers]
    assert jobs.serial[decision.rows].tolist() == decision.serials.tolist()
    seen: list[int] = []
    for worker, share in zip(snapshot.workers, decision.workers, strict=True):
        here = {row for row in running if jobs.home[row] == worker.number}
        run, paused = set(share.run.tolist()), set(share.pause.tolist())
        seen += share.run.tolist()
        assert len(share.run) <= worker.max_running
        assert run & here == here - paused
        assert paused <= here
        assert run - here <= queued
        bound = stays and not preset.params.get("move_gain")
        assert all(could_run(snapshot, row, worker.number, bound) for row in run - here)
        returns = {
            row for row in here if SLICES[preset.slice].returns and jobs.slice_exhausted[row]
        }
        renews = stays and FORMS[preset.form].renews  # paused without room at the end of a slice
        assert renews or not paused - returns or run - here  # each pause admits another request
        assert sorted(share.victims.tolist()) == sorted(run)
        cap, output = jobs.cap[share.run], jobs.output[share.run]
        assert (share.limits <= np.maximum(cap, jobs.limit[share.run])).all()
        assert (share.limits >= np.minimum(cap, output + 1)).all()
    assert len(set(seen)) == len(seen)
    idle = [
        (w.number, share) for w, share in zip(snapshot.workers, decision.workers, strict=True)
        if not any(jobs.home[row] == w.number for row in running)
    ]  # fmt: skip
    left = queued - set(seen)
    for number, share in idle if conserves(preset) else []:
        assert len(share.run) or not any(could_run(snapshot, row, number, stays) for row in left)
    whys = decision.explanations
    assert len(set(whys.rows.tolist())) == len(whys.rows)
    admitted = set(whys.rows[whys.reasons == WaitReason.ADMITTED].tolist())
    assert admitted == set(seen) - running
    assert set(whys.rows.tolist()) == set(decision.rows.tolist()) - running
    if stays:
        check_adapters(snapshot, decision)


def check_adapters(snapshot: Snapshot, decision: Decision) -> None:
    """Adapters without a running or paused request at a worker begin there only in free slots, or
    after a turn."""
    jobs, running = snapshot.jobs, set(snapshot.running.tolist())
    rests = (jobs.home != NOWHERE) & (jobs.held > 0)
    there = running | set(rests.nonzero()[0].tolist())
    for worker, share in zip(snapshot.workers, decision.workers, strict=True):
        present = {int(jobs.adapter[r]) for r in there if jobs.home[r] == worker.number} - {0}
        fresh = [row for row in share.run.tolist() if row not in running and not rests[row]]
        turn_s = worker.adapter_turn_s
        late = {int(jobs.adapter[r]) for r in fresh if snapshot.now - jobs.since_s[r] >= turn_s}
        begin = {int(jobs.adapter[row]) for row in fresh} - late - present - {0}
        assert (
            not begin or not worker.adapter_slots or (len(present | begin) <= worker.adapter_slots)
        )


def bytes_of(snapshot: Snapshot) -> bytes:
    """All values of a snapshot, without those that workers have derived."""
    fresh = tuple(replace(worker) for worker in snapshot.workers)
    return pickle.dumps(replace(snapshot, workers=fresh))


@pytest.mark.parametrize("preset", ALL)
@settings(max_examples=examples(60))
@given(st.booleans().flatmap(snapshots), st.integers(0, 2**32))
def test_decision_is_valid_and_deterministic(preset: str, snapshot: Snapshot, seed: int) -> None:
    """Columns and memory are read-only, so that a write raises."""
    before = bytes_of(snapshot)
    first = decided(snapshot, preset, PolicyMemory(), seed)
    check(snapshot, first, choose(preset))
    second = decided(snapshot, preset, first.memory, seed)
    check(snapshot, second, choose(preset))
    assert bytes_of(snapshot) == before
    assert pickle.dumps(decided(snapshot, preset, PolicyMemory(), seed)) == pickle.dumps(first)
    assert pickle.dumps(decided(snapshot, preset, first.memory, seed)) == pickle.dumps(second)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(60))
@given(snapshots(), st.integers(0, 2**32), st.sampled_from(["swap", "defer"]))
def test_form_is_valid_with_slices_and_preemption(
    form: str, snapshot: Snapshot, seed: int, residency: str
) -> None:
    """Includes the `relief` victim order."""
    cells = {"form": form, "victim": "relief", "residency": residency}
    for base in ("alise", "fcfs"):
        chosen = choose(base, cells | ({"slice": "turns"} if base == "fcfs" else {}))
        decision = decide(snapshot, chosen, PolicyMemory(), np.random.default_rng(seed), 7)
        check(snapshot, decision, chosen)


@pytest.mark.parametrize("preset", ALL)
def test_decision_is_empty_without_workers(preset: str) -> None:
    empty = Snapshot(0.0, jobs(0), np.arange(0), np.arange(0), (), table())
    decision = decided(empty, preset, PolicyMemory(), 0)
    assert (decision.workers, len(decision.explanations.rows)) == ((), 0)
    three = Snapshot(0.0, jobs(3), np.arange(3), np.arange(0), (), table())
    assert decided(three, preset, PolicyMemory(), 0).workers == ()


def one_each(*lengths: int) -> Snapshot:
    """A small and a large worker, both idle; requests of these lengths wait."""
    count = len(lengths)
    made = jobs(count, prompt=[10] * count, cap=[length - 10 for length in lengths])
    workers = (node(1, 100, 4), node(2, 5_000, 4))
    return Snapshot(0.0, made, np.arange(count), np.arange(0), workers, table())


@pytest.mark.parametrize("preset", ALL)
def test_request_that_fits_only_large_worker_runs_there(preset: str) -> None:
    snapshot = one_each(4_000, 50)
    shares = {
        s.worker: s.run.tolist() for s in decided(snapshot, preset, PolicyMemory(), 0).workers
    }
    assert 0 in shares[2]
    assert 1 in shares[1] + shares[2]


QUICK = CostModel(0.001, 0.0, 0.0001, 0.0)
SLOW = CostModel(0.4, 0.0, 0.04, 0.0)


@pytest.mark.parametrize("preset", [name for name in ALL if conserves(choose(name))])
def test_slow_idle_worker_takes_request_that_full_fast_worker_cannot(preset: str) -> None:
    """Each of three requests would end sooner on the fast worker, which holds only one of them."""
    made = jobs(3, prompt=[60] * 3, cap=[30] * 3, total=[30.0] * 3)
    workers = (node(1, 100, 4, cost=QUICK), node(2, 100, 4, cost=SLOW))
    snapshot = Snapshot(0.0, made, np.arange(3), np.arange(0), workers, table())
    decision = decided(snapshot, preset, PolicyMemory(), 0)
    assert sorted(len(share.run) for share in decision.workers) == [1, 1]
    [left] = {0, 1, 2} - {row for share in decision.workers for row in share.run.tolist()}
    reported = explanation(decision.explanations, left)
    assert reported is not None and reported.reason is not WaitReason.ADMITTED


def test_batch_respects_context_length_of_its_worker() -> None:
    """Worker 2 has more memory but too short a context length for the first request."""
    made = jobs(2, prompt=[10, 10], cap=[890, 90])
    workers = (node(1, 1_000, 4), node(2, 2_000, 4, reach_tokens=500))
    snapshot = Snapshot(0.0, made, np.arange(2), np.arange(0), workers, table())
    shares = decided(snapshot, "vs", PolicyMemory(), 0).workers
    assert all(0 not in share.run for share in shares if share.worker == 2)
    assert sorted(row for share in shares for row in share.run.tolist()) == [0, 1]


def test_wait_reasons_have_explanations() -> None:
    assert EXPLANATIONS.keys() == set(WaitReason)
    rows, reasons = np.array([4, 2]), np.array([WaitReason.MEMORY, WaitReason.BLOCKED])
    whys = WaitExplanations(rows, reasons, np.array([120.0, 3.0]), np.array([100.0, 0.0]))
    assert str(explanation(whys, 4)) == "needs 120 KV tokens in all, limit 100"
    assert str(explanation(whys, 2)) == "queue position 3, behind a request that does not fit"
    assert explanation(whys, 3) is None
    joined = WaitExplanations.concatenate([whys, WaitExplanations()])
    assert [getattr(joined, each.name).tolist() for each in fields(WaitExplanations)] == [
        [4, 2], [WaitReason.MEMORY, WaitReason.BLOCKED], [120, 3], [100, 0],
    ]  # fmt: skip
