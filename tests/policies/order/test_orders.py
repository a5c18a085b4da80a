"""Orders against plain arithmetic, one request at a time."""

from dataclasses import dataclass, replace
from math import ceil, inf, log2

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.policies.memory import PolicyMemory
from services.policies.order.alise import LEVEL, alise
from services.policies.order.pace import SEQS, measure_pace
from services.policies.order.waiting import MAX_AGE_S, arrival
from services.policies.snapshot import Snapshot
from tests.policies.made_snapshots import COST, jobs, node, snapshots, table

PARAMS = {"levels": 4.0, "base_s": 0.05, "ageing_s": 10.0, "hysteresis": 0.25}


def seqs_of(snapshot: Snapshot, known: float) -> float:
    """The number of running requests per worker, followed by doublings."""
    seqs = max(1.0, len(snapshot.running) / len(snapshot.workers))
    return known if seqs / 2 <= known <= 2 * seqs else seqs


def takes_s(snapshot: Snapshot, row: int, tokens: float, seqs: float) -> float:
    """All workers have the same costs here."""
    jobs = snapshot.jobs
    missing = max(0, int(jobs.prompt[row] + jobs.output[row] - jobs.held[row]))
    decode_s = max(1.0, tokens) * (COST.base_s / seqs + COST.decode_seq_s)
    return missing * COST.prefill_token_s + decode_s


@settings(max_examples=150)
@given(snapshots())
def test_arrival_order_ranks_by_arrival_without_preemption(snapshot: Snapshot) -> None:
    jobs = snapshot.jobs
    found = arrival(snapshot, {}, PolicyMemory())
    rows = [*snapshot.queued.tolist(), *snapshot.running.tolist()]
    assert found.rows.tolist() == rows
    assert found.split == len(snapshot.queued)
    seqs = seqs_of(snapshot, 0.0)
    for at, row in enumerate(rows):
        evicted = MAX_AGE_S if jobs.preemptions[row] else 0.0
        assert found.key[at] == pytest.approx(jobs.arrival_s[row] - 100 - evicted)
        assert found.queue_key[at] == (found.key[at] if at < found.split else -inf)
        left = max(0.0, float(jobs.total[row]) - int(jobs.output[row]))
        assert found.remaining_s[at] == pytest.approx(takes_s(snapshot, row, left, seqs))
    assert (found.lift_s == inf).all()
    assert found.next_s == inf


@dataclass
class Known:
    """What ALISE remembers of a request."""

    expected_tokens: float = 0.0
    demoted: int = 0
    lifted: bool = False
    starved: bool = False
    front: bool = False


def level_of(remaining_s: float, moved: int) -> int:
    last = int(PARAMS["levels"]) - 1
    own = ceil(log2(max(remaining_s / PARAMS["base_s"], 1e-9)))
    return min(max(min(max(own, 0), last) + moved, 0), last)


def near_edge(remaining_s: float) -> bool:
    """Whether rounding decides the level: the ratio is within rounding of a power of two."""
    doublings = log2(max(remaining_s / PARAMS["base_s"], 1e-9))
    return abs(doublings - round(doublings)) < 1e-9


class Literal:
    """The docstring of alise.py, one request at a time, over several rounds."""

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}
        self.near_edge = False
        self.seqs = 0.0

    def rank(self, snapshot: Snapshot) -> dict[int, tuple[float, float, float]]:
        """Return the key, the queue key and the remaining time of each row."""
        jobs, now = snapshot.jobs, snapshot.now
        queued = snapshot.queued.tolist()
        rows = [*queued, *snapshot.running.tolist()]
        self.seqs = seqs_of(snapshot, self.seqs)
        self.known = {
            int(jobs.serial[row]): self.known.get(int(jobs.serial[row]), Known()) for row in rows
        }
        known = {row: self.known[int(jobs.serial[row])] for row in rows}
        waited = {row: now - jobs.since_s[row] if row in queued else -inf for row in rows}
        for row, job in known.items():
            cap = int(jobs.cap[row])
            job.expected_tokens = job.expected_tokens or min(cap, float(jobs.total[row]))
            while job.expected_tokens <= jobs.output[row] and job.expected_tokens < cap:
                job.expected_tokens = min(2 * job.expected_tokens, cap)
                job.demoted, job.lifted = job.demoted + 1, False
            job.lifted |= bool(waited[row] >= PARAMS["ageing_s"])
            job.starved |= bool(waited[row] >= PARAMS["levels"] * PARAMS["ageing_s"])
        self._move_to_front(snapshot, known, queued)
        return {row: self._rank(snapshot, row, known[row], row in queued) for row in rows}

    def _move_to_front(
        self, snapshot: Snapshot, known: dict[int, Known], queued: list[int]
    ) -> None:
        """Move one starved request per worker to the front. One that runs or is paused there stays;
        otherwise the oldest one paused there moves up, unless an older one has no KV anywhere. That
        one waits until no worker of its model has one."""
        jobs = snapshot.jobs
        placed = {row: row not in queued or bool(jobs.held[row] > 0) for row in known}
        for row, job in known.items():
            job.front &= placed[row]
        oldest_first = sorted(known, key=lambda row: (jobs.arrival_s[row], jobs.serial[row]))
        for model in {worker.model for worker in snapshot.workers}:
            waits = [
                row for row in oldest_first
                if row in queued and known[row].starved and not known[row].front
                and jobs.model[row] == model
            ]  # fmt: skip
            roaming = next((row for row in waits if not placed[row]), None)
            here = {worker.number for worker in snapshot.workers if worker.model == model}
            taken = {int(jobs.home[row]) for row, job in known.items() if job.front}
            for number in here - taken:
                rests = (row for row in waits if placed[row] and jobs.home[row] == number)
                first = next(rests, None)
                if first is not None and (
                    roaming is None or jobs.arrival_s[first] <= jobs.arrival_s[roaming]
                ):
                    known[first].front = True
                    taken.add(number)
            if roaming is not None and not here & taken:
                known[roaming].front = True

    def _rank(
        self, snapshot: Snapshot, row: int, job: Known, waits: bool
    ) -> tuple[float, float, float]:
        jobs = snapshot.jobs
        left = job.expected_tokens - int(jobs.output[row])
        remaining_s = takes_s(snapshot, row, left, self.seqs)
        moved = job.demoted - job.lifted
        level = level_of(remaining_s, moved)
        shorter_s = remaining_s / (1 + PARAMS["hysteresis"])
        self.near_edge |= near_edge(remaining_s) or near_edge(shorter_s)
        age_s = snapshot.now - float(jobs.arrival_s[row])
        key = -LEVEL / 2 - age_s if job.front else level * LEVEL + remaining_s
        if waits:
            return key, key, remaining_s
        if job.front or jobs.held[row] == 0:
            return key, -inf, remaining_s
        passed = level_of(shorter_s, moved) * LEVEL + shorter_s
        return key, min(passed, level * LEVEL), remaining_s


@settings(max_examples=150)
@given(snapshots(), st.lists(st.integers(0, 2**32), min_size=1, max_size=4))
def test_alise_matches_reference_implementation_over_rounds(
    snapshot: Snapshot, seeds: list[int]
) -> None:
    """Outputs grow, time passes, and some rows are reused. Both sides round alike except at the
    edge of a level, so such examples are discarded."""
    literal, memory = Literal(), PolicyMemory()
    for number, seed in enumerate(seeds, 1):
        found = alise(snapshot, PARAMS, memory)
        memory = found.memory
        expected = literal.rank(snapshot)
        assume(not literal.near_edge)
        rows = found.rows.tolist()
        assert found.key.tolist() == pytest.approx([expected[row][0] for row in rows])
        assert found.queue_key.tolist() == pytest.approx([expected[row][1] for row in rows])
        assert found.remaining_s.tolist() == pytest.approx([expected[row][2] for row in rows])
        assert memory.number(SEQS) == literal.seqs
        rng = np.random.default_rng(seed)
        old = snapshot.jobs
        anew = rng.random(len(old)) < 0.2
        since_s = np.where(anew, snapshot.now, old.since_s)
        snapshot = replace(
            snapshot,
            now=snapshot.now + float(rng.choice([0.0, 3.0, 12.0, 50.0])),
            jobs=replace(
                old,
                serial=np.where(anew, 100 * number + np.arange(len(old)), old.serial),
                output=np.minimum(old.cap, old.output + rng.integers(0, 30, len(old))),
                arrival_s=since_s,
                since_s=since_s,
            ),
        )


def waiting(now: float, since_s: list[float], running: int = 0, workers: int = 1) -> Snapshot:
    count = len(since_s)
    made = jobs(count, since_s=since_s, arrival_s=since_s)
    split = count - running
    nodes = tuple(node(number) for number in range(1, workers + 1))
    return Snapshot(now, made, np.arange(split), np.arange(split, count), nodes, table())


def levels(snapshot: Snapshot, memory: PolicyMemory) -> tuple[list[float], PolicyMemory, float]:
    found = alise(snapshot, PARAMS, memory)
    return np.floor(found.key / LEVEL).tolist(), found.memory, found.next_s


def test_alise_ageing_lifts_one_level_and_front_takes_one_per_worker() -> None:
    """Three requests of the second queue wait from the start; after 40 s they are starved."""
    at, memory, next_s = levels(waiting(0.0, [0.0, 0.0, 0.0]), PolicyMemory())
    own = at[0]
    assert (at, next_s) == ([own] * 3, 10.0)
    at, memory, next_s = levels(waiting(10.0, [0.0, 0.0, 0.0]), memory)
    assert (at, next_s) == ([own - 1] * 3, 40.0)
    at, memory, next_s = levels(waiting(39.0, [0.0, 0.0, 0.0]), memory)
    assert (at, next_s) == ([own - 1] * 3, 40.0)
    at, memory, next_s = levels(waiting(40.0, [0.0, 0.0, 0.0]), memory)
    assert (at, next_s) == ([-1, own - 1, own - 1], inf)
    at, memory, _ = levels(waiting(400.0, [0.0, 0.0, 0.0]), memory)
    assert at == [-1, own - 1, own - 1]
    # The request at the front has no KV and no worker yet: the next one waits until it is placed.
    assert levels(waiting(400.0, [0.0, 0.0, 0.0], workers=2), memory)[0] == [-1, own - 1, own - 1]


def test_pace_follows_running_count_by_doublings() -> None:
    memory = PolicyMemory()
    seen = []
    for running in (8, 12, 16, 17, 9, 8, 1):
        snapshot = waiting(0.0, [0.0] * running, running=running)
        pace, memory = measure_pace(snapshot, memory)
        assert pace.token_s == pytest.approx(COST.base_s / pace.seqs + COST.decode_seq_s)
        seen.append(pace.seqs)
    assert seen == [8, 8, 8, 17, 17, 8, 1]
