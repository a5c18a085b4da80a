"""Feedback queues and response ratios: worked examples and reference implementations over
rounds."""

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecast import certain
from services.policies.memory import PolicyMemory
from services.policies.order.ranking import CLASS
from services.policies.order.registry import ORDERS
from services.policies.snapshot import Snapshot
from tests.examples import examples
from tests.policies.made_snapshots import jobs, node, snapshots, table
from tests.policies.order.order_world import World, a_turn_later, stream

MLFQ, HRRN = ORDERS["mlfq"].rank, ORDERS["hrrn"].rank
PARAMS = {"base_quantum_s": 1.0, "growth": 2.0, "queues": 5.0, "ageing_s": 40.0}
STEP = CostModel(0.25, 0.125, 0.0, 0.0)  # a step takes 0.25 s, a prompt token 0.125 s


@dataclass
class Known:
    queue: int
    entered_s: float
    output: int
    held: int
    used_s: float = 0.0


class Literal:
    """The docstring of mlfq.py, one request at a time."""

    def __init__(self) -> None:
        self.known: dict[int, Known] = {}

    def rank(self, snapshot: Snapshot) -> dict[int, tuple[float, float]]:
        made, now = snapshot.jobs, snapshot.now
        running = snapshot.running.tolist()
        rows = [*snapshot.queued.tolist(), *running]
        known = {}
        for row in rows:
            output, held = int(made.output[row]), int(made.held[row])
            job = self.known.get(int(made.serial[row]))
            if job is None:
                job = Known(0, float(made.arrival_s[row]), output, held)
                first_s = 0.25 + 0.125 * (int(made.prompt[row]) + output)
                while first_s > 2**job.queue and job.queue < 4:
                    job.queue += 1
            tokens = max(0, output - job.output)
            job.used_s += 0.25 * tokens + 0.125 * max(0, held - job.held - tokens)
            job.output, job.held = output, held
            while job.used_s > 2**job.queue and job.queue < 4:
                job.used_s -= 2**job.queue
                job.queue, job.entered_s = job.queue + 1, now
            waits = row not in running
            if waits and job.queue and now - made.since_s[row] >= 40:
                job.queue, job.used_s, job.entered_s = 0, 0.0, now
            known[int(made.serial[row])] = job
        self.known = known
        return {row: self._key(snapshot, row, row in running) for row in rows}

    def _key(self, snapshot: Snapshot, row: int, runs: bool) -> tuple[float, float]:
        job = self.known[int(snapshot.jobs.serial[row])]
        key = (job.queue + 0.5) * CLASS - (snapshot.now - job.entered_s)
        if runs:
            return key, -inf if snapshot.jobs.held[row] == 0 else job.queue * CLASS
        return key, key


@settings(max_examples=examples(150))
@given(snapshots(), st.lists(st.integers(0, 2**32), min_size=1, max_size=6))
def test_mlfq_matches_reference_implementation_over_rounds(
    snapshot: Snapshot, seeds: list[int]
) -> None:
    literal, memory = Literal(), PolicyMemory()
    workers = tuple(replace(worker, cost=STEP) for worker in snapshot.workers)
    snapshot = replace(snapshot, workers=workers)
    for number, seed in enumerate(seeds, 1):
        found = MLFQ(snapshot, PARAMS, memory)
        memory = found.memory
        expected = literal.rank(snapshot)
        rows = found.rows.tolist()
        assert found.key.tolist() == pytest.approx([expected[row][0] for row in rows], abs=1e-6)
        assert found.queue_key.tolist() == pytest.approx(
            [expected[row][1] for row in rows], abs=1e-6
        )
        before = snapshot.jobs
        rng = np.random.default_rng(seed)
        snapshot = a_turn_later(snapshot, number, rng, 12, (0.0, 0.5, 3.0, 25.0))
        joined = snapshot.jobs.serial != before.serial
        arrival_s = np.where(joined, snapshot.now, before.arrival_s)
        snapshot = replace(snapshot, jobs=replace(snapshot.jobs, arrival_s=arrival_s))


def test_mlfq_prompt_joins_first_queue_that_covers_its_prefill() -> None:
    """Quanta are 1, 2, 4, 8 and 16 s. Prefill and first step take 0.5 s for 2 tokens, 1 s for 6,
    more than 1 s for 7, 8 s for 62, and more than any quantum for 999."""
    of = jobs(5, prompt=[2, 6, 7, 62, 999])
    worker = replace(node(), cost=STEP)
    snapshot = Snapshot(0.0, of, np.arange(5), np.arange(0), (worker,), table(certain(50)))
    assert np.floor(MLFQ(snapshot, PARAMS, PolicyMemory()).key / CLASS).tolist() == [0, 0, 1, 3, 4]


def test_mlfq_transcript_of_three_requests() -> None:
    """A token takes a second; quanta are 2, 4 and 8 s, and each is exceeded by one token. a and b
    run for 3 s each and move to the second queue; c ends in the first. a has used one second
    there and moves down after 4 more, at 7 tokens. b does the same, but then no request of a
    better queue preempts it, so it ends before a."""
    world = World("mlfq", base_quantum_s=2, growth=2, queues=3)
    world.submit("a", 8)
    world.submit("b", 8)
    world.submit("c", 2)
    world.go(18)
    assert world.turns() == " ".join("aaa" + "bbb" + "cc" + "aaaa" + "bbbb" + "b" + "a")


def test_mlfq_arrival_preempts_demoted_request() -> None:
    world = World("mlfq", base_quantum_s=2, growth=2, queues=3)
    world.submit("a", 8)
    world.go(4)
    world.submit("b", 2)
    world.go(6)
    assert world.turns() == " ".join("aaaa" + "bb" + "aaaa")


def ended(ageing_s: float) -> bool:
    """Return whether x ends. Requests of 2 s arrive every second, x needs 6 s, and quanta are 2 and
    4 s."""
    world = World("mlfq", base_quantum_s=2, growth=2, queues=8, ageing_s=ageing_s)
    world.submit("x", 6)
    world.go(150, stream(world, 1, 2))
    return "x" in world.ended


def test_mlfq_ageing_ends_starvation_under_overload() -> None:
    """x runs for 3 s and then stays in the second queue. Ageing moves it to the end of the first
    after 20 s, behind 20 requests of 2 s; after 40 s it runs for its last 3 s."""
    assert not ended(inf)
    assert ended(20.0)


# Highest response ratio next


def literal_ratio(snapshot: Snapshot, row: int) -> float:
    made = snapshot.jobs
    seqs = max(1.0, len(snapshot.running) / len(snapshot.workers))
    cost = snapshot.workers[0].cost
    step_s = cost.base_s + seqs * cost.decode_seq_s
    tokens = max(1.0, float(made.total[row]) - int(made.output[row]))
    missing = max(0, int(made.prompt[row] + made.output[row] - made.held[row]))
    serve_s = tokens * step_s + missing * cost.prefill_token_s
    return (snapshot.now - float(made.arrival_s[row]) + serve_s) / serve_s


@settings(max_examples=examples(100))
@given(snapshots())
def test_hrrn_ranks_by_response_ratio_without_preemption(snapshot: Snapshot) -> None:
    found = HRRN(snapshot, {}, PolicyMemory())
    expected = [-literal_ratio(snapshot, row) for row in found.rows.tolist()]
    assert found.key.tolist() == pytest.approx(expected)
    assert (found.queue_key[found.split :] == -inf).all()


def test_hrrn_transcript() -> None:
    """One slot, one token per second. a runs until 5 s. Then b, of 4 s, has waited 5: (5 + 4) / 4 =
    2.25; c, of 1 s, arrived at 4 s: (1 + 1) / 1 = 2. b runs until 9 s; c has then waited 5 s: 6. d,
    of 10 s, arrived first and has waited 9 s: 1.9. Shortest first would run c before b."""
    world = World("hrrn")
    world.submit("a", 5)
    world.go(1)
    world.submit("d", 10).arrival_s = 0.0
    world.submit("b", 4).arrival_s = 0.0
    world.go(3)
    world.submit("c", 1)
    world.go(16)
    assert world.turns() == " ".join("aaaaa" + "bbbb" + "c" + "d" * 10)
