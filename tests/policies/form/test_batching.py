"""Batches over several rounds: start times, returning requests and completeness."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.policies.decision import WaitReason
from services.policies.order.waiting import by_ratio
from services.policies.preset import PLACEMENTS_BY_ARRANGEMENT, choose, presets
from services.policies.snapshot import WorkerSnapshot
from tests.examples import examples
from tests.policies.explanations import explanation
from tests.policies.form.batch_fleet import Fleet
from tests.policies.made_snapshots import node

BATCHED = [name for name, row in presets().items() if row.arrangement == "batch"]
COST = CostModel(base_s=0.5, prefill_token_s=0.1, decode_seq_s=0.0, context_token_s=0.0)


def nodes(count: int, kv_tokens: int = 10_000, slots: int = 99) -> tuple[WorkerSnapshot, ...]:
    return tuple(node(number, kv_tokens, slots, cost=COST) for number in range(1, count + 1))


def begun(fleet: Fleet) -> list[tuple[float, int, list[int]]]:
    return [(each.now, each.worker, sorted(each.rows)) for each in fleet.reported]


def test_sls_transcript() -> None:
    """Two workers run two requests at once, and requests alternate between them. The first batch of
    worker 2 takes three ticks; request 5 waits for worker 2 though worker 1 is idle."""
    fleet = Fleet("sls", nodes(2), {"batch_size": 2})
    fleet.ask((4, 1), (4, 3), (4, 1), (4, 1), (4, 1), (4, 1))
    fleet.run(6)
    assert begun(fleet) == [(0, 1, [0, 2]), (0, 2, [1, 3]), (1, 1, [4]), (3, 2, [5])]
    assert fleet.over


def test_idle_worker_takes_next_batch() -> None:
    fleet = Fleet("vs", nodes(2), {"batch_size": 2})
    fleet.ask((4, 1), (4, 3), (4, 1), (4, 1), (4, 1), (4, 1))
    fleet.run(5)
    assert begun(fleet) == [(0, 1, [0, 1]), (0, 2, [2, 3]), (1, 2, [4, 5])]


def test_unfinished_requests_queue_behind_later_arrivals() -> None:
    """Slices have 2 tokens and batches two members. Request 0 needs 5 tokens; requests 2 and 3
    arrive when it has 2."""
    fleet = Fleet("so", nodes(1), {"batch_size": 2, "slice_tokens": 2})
    fleet.ask((4, 5), (4, 1))
    fleet.run(1)
    fleet.ask((4, 1), (4, 1))
    fleet.run(7)
    assert begun(fleet) == [(0, 1, [0, 1]), (2, 1, [2, 3]), (3, 1, [0]), (5, 1, [0])]
    assert [each.limits for each in fleet.reported] == [(2, 2), (2, 2), (4,), (6,)]
    assert fleet.over and fleet.asked[0].preemptions == 2


def test_returned_and_waiting_requests_are_batched_together() -> None:
    """The round that returns the unfinished requests cuts no batch; the next round batches all
    three."""
    fleet = Fleet("so", nodes(1), {"batch_size": 3, "slice_tokens": 1})
    fleet.ask((4, 2), (4, 2))
    fleet.run(1)
    fleet.ask((4, 1))
    first = fleet.round()
    assert first.workers[0].pause.tolist() == [0, 1] and not len(first.workers[0].run)
    assert fleet.now < first.next_s < fleet.now + 1e-6
    assert sorted(fleet.round().workers[0].run.tolist()) == [0, 1, 2]


def test_interval_transcript() -> None:
    """One step of N prompts of L takes 1 + 0.1·N·L s, and a slice has one token. Γ = 2, λ = 0.5.

    t = 0   {0} and {1} take 1 + 0.1·40 = 5 s and 1 + 0.1·10 = 2 s apart, 1 + 0.1·2·40 = 9 s
            together: two batches, one per worker; T = max(0.5·2, 2) = 2 s
    t = 1   request 2 arrives and waits until t = 2, though worker 2 is idle
    t = 2   request 2 forms a batch of 1 + 0.1·20 = 3 s for worker 2: loads 5 and 3 (the test keeps
            request 0 running), so T = max(1.5, 2)
    """
    fleet = Fleet("scls", nodes(2), {"slice_tokens": 1, "interval_s": 2.0, "interval_share": 0.5})
    fleet.ask((40, 1), (10, 1))
    first = fleet.round()
    assert begun(fleet) == [(0, 1, [0]), (0, 2, [1])]
    assert first.numbers["batch_until_s"] == 2.0
    assert first.notes["serve_s"].tolist() == [5.0, 2.0]
    fleet.now = 1.0
    fleet.asked[1].over, fleet.asked[1].runs = True, False
    fleet.ask((20, 1))
    waits = fleet.round()
    assert waits.next_s == 2.0 and len(fleet.reported) == 2
    assert (
        str(explanation(waits.explanations, 2)) == "waits 1.0 s until the pool is cut into batches"
    )
    fleet.now = 2.0
    last = fleet.round()
    assert begun(fleet)[2:] == [(2, 2, [2])]
    assert last.numbers["batch_until_s"] == 4.0
    assert last.not_before_s == 2.0  # the interval delays forming, not rounds


def test_interval_follows_smallest_load() -> None:
    """Each worker has two batches of 5 s: T = 0.5 · 10 = 5 s."""
    fleet = Fleet("scls", nodes(2), {"slice_tokens": 1, "interval_s": 2.0, "batch_size": 1})
    fleet.ask((40, 1), (40, 1), (40, 1), (40, 1))
    decision = fleet.round()
    assert decision.numbers["batch_until_s"] == 5.0
    assert sorted(decision.notes["worker"].tolist()) == [1, 1, 2, 2]
    waiting = [
        str(explanation(decision.explanations, row))
        for row in range(4)
        if not fleet.asked[row].runs
    ]
    assert sorted(waiting) == [
        "in a batch for worker 1, 0 batches ahead",
        "in a batch for worker 2, 0 batches ahead",
    ]


def test_assigned_batches_start_during_interval() -> None:
    fleet = Fleet("lb", nodes(1), {"slice_tokens": 1, "interval_s": 50.0, "batch_size": 1})
    fleet.ask((40, 1), (10, 1), (20, 1))
    fleet.run(4)
    assert begun(fleet) == [(0, 1, [0]), (1, 1, [1]), (2, 1, [2])]


def test_interval_ends_when_all_workers_are_idle() -> None:
    fleet = Fleet("scls", nodes(1), {"slice_tokens": 9, "interval_s": 50.0})
    fleet.ask((4, 1))
    fleet.run(1)
    fleet.ask((4, 1))
    fleet.run(1)
    assert begun(fleet) == [(0, 1, [0]), (1, 1, [1])]


def test_batches_of_lost_worker_go_to_another() -> None:
    fleet = Fleet("lb", nodes(2), {"slice_tokens": 1, "interval_s": 50.0, "batch_size": 1})
    fleet.ask((40, 1), (40, 1), (10, 1), (10, 1))
    fleet.round()
    assert begun(fleet) == [(0, 1, [0]), (0, 2, [1])]
    fleet.workers = fleet.workers[:1]
    fleet.evict(1)
    fleet.asked[1].evictions = 0  # a lost worker is no eviction for memory
    fleet.run(60)
    assert fleet.over
    assert [worker for _, worker, _ in begun(fleet)[2:]] == [1, 1, 1]


def test_batch_with_highest_response_ratio_is_next() -> None:
    """T = 1 + 0.1·N·L + 0.5·(G − 1) s. The worker becomes idle at t = 4:

      {1}: arrived at 0, (90, 1), serves in 10 s: (4 + 10)/10 = 1.4
      {2}: arrived at 2, (10, 1), serves in 2 s: (2 + 2)/2 = 2

    At t = 5, {1} has 1.5 and {3}, (10, 1), has just arrived: (0 + 2)/2 = 1.
    """
    fleet = Fleet("magnus", nodes(1), {"wma_max": 1, "estimator": "linear"})
    fleet.ask((4, 4))
    fleet.round()
    fleet.ask((90, 1))
    fleet.run(2)
    fleet.ask((10, 1))
    fleet.run(3)
    fleet.ask((10, 1))
    fleet.run(3)
    assert begun(fleet) == [(0, 1, [0]), (4, 1, [2]), (5, 1, [1]), (6, 1, [3])]
    assert by_ratio(np.array([4.0, 2.0]), np.array([10.0, 2.0])).tolist() == [-1.4, -2.0]


def test_open_batch_takes_arrivals_until_sent() -> None:
    fleet = Fleet("abp", nodes(1))
    fleet.ask((10, 3))
    fleet.run(1)
    fleet.ask((10, 3))
    fleet.run(1)
    fleet.ask((11, 3), (900, 90))
    reported = fleet.round().explanations
    assert str(explanation(reported, 2)) == "in a batch of 2, 0 batches ahead"
    assert str(explanation(reported, 3)) == "in a batch of 1, 1 batches ahead"
    fleet.run(5)
    assert begun(fleet) == [(0, 1, [0]), (3, 1, [1, 2]), (6, 1, [3])]


def test_batch_is_halved_and_closed_after_eviction() -> None:
    """Of a batch of four, request 2 is evicted: the others stop too. {2, 0} and {1, 3} run one
    after the other, because an evicted request is first in line. Request 4 would fit but gets
    its own batch."""
    fleet = Fleet("abp", nodes(1))
    fleet.ask(*[(10, 9)] * 4, foreseen=3)
    fleet.run(2)
    fleet.evict(2)
    fleet.ask((10, 9), foreseen=3)
    halved = fleet.round()
    assert halved.workers[0].pause.tolist() == [0, 1, 3] and halved.next_s < fleet.now + 1e-6
    assert halved.notes["closed"][np.argsort(halved.rows)].tolist() == [1, 1, 1, 1, 0]
    fleet.run(30)
    assert sorted(rows for _, _, rows in begun(fleet)[1:]) == [[0, 2], [1, 3], [4]]
    assert fleet.over


def test_evicted_batch_of_one_runs_again() -> None:
    fleet = Fleet("magnus", nodes(1))
    fleet.ask((10, 9))
    fleet.run(2)
    fleet.evict(0)
    fleet.run(30)
    assert fleet.over and begun(fleet) == [(0, 1, [0]), (2, 1, [0])]


def test_small_worker_takes_part_of_batch_that_fits() -> None:
    """The batch is cut for the large, busy worker; of 5 requests padded to 14, 3 fit 0.7 · 64
    tokens."""
    workers = (node(1, 64, 9, cost=COST), node(2, 10_000, 9, cost=COST))
    fleet = Fleet("abp", workers)
    fleet.ask((900, 50))
    fleet.run(1)
    fleet.ask(*[(10, 4)] * 5, cap=4)
    fleet.run(10)
    assert begun(fleet)[:3] == [(0, 2, [0]), (1, 1, [1, 2, 3]), (5, 1, [4, 5])]


def test_static_batch_starts_in_lockstep() -> None:
    for mode, lockstep in (("static", True), ("continuous", False)):
        fleet = Fleet("vs", nodes(1), {"batch_mode": mode})
        fleet.ask((4, 2))
        assert [share.lockstep for share in fleet.round().workers] == [lockstep]
        assert [share.lockstep for share in fleet.round().workers] == [False]


def test_continuous_batch_releases_ended_requests_and_admits_none() -> None:
    fleet = Fleet("vs", nodes(1), {"batch_mode": "continuous", "batch_size": 2})
    fleet.ask((4, 1), (4, 3), (4, 1))
    fleet.run(1)
    assert [each.over for each in fleet.asked] == [True, False, False]
    fleet.run(4)
    assert begun(fleet) == [(0, 1, [0, 1]), (3, 1, [2])]


# Random loads

changes = st.fixed_dictionaries({
    "batch_mode": st.sampled_from(["static", "continuous"]),
    "place": st.sampled_from(sorted(PLACEMENTS_BY_ARRANGEMENT["batch"])),
    "interval": st.sampled_from(["events", "load"]),
})  # fmt: skip


@pytest.mark.parametrize("form", ["fixed", "dp", "wma"])
@settings(max_examples=examples(40), deadline=None)
@given(
    changes, st.sampled_from(["whole", "turns"]), st.sampled_from(["arrival", "hrrn", "fifo"]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_batching_serves_every_request_within_memory(
    form: str, choices: Mapping[str, str], slices: str, order: str, seed: int
) -> None:
    """Random choices, with evictions and a worker that leaves and returns. Each batch fits as
    planned: padded to the longest, with the permitted output (or for `wma` the forecast output)."""
    rng = np.random.default_rng(seed)
    given_row = {**choices, "slice": slices, "order": order, "form": form}
    if slices == "turns":
        given_row["slice_tokens"] = str(rng.integers(1, 9))
    workers = tuple(
        node(number, int(rng.choice([80, 160])), int(rng.integers(1, 6)), block_tokens=4, cost=COST)
        for number in range(1, 4)
    )
    fleet = Fleet("vs", workers, given_row)
    for tick in range(400):
        if tick < 12:
            fleet.ask(
                *((int(rng.integers(1, 20)), int(rng.integers(1, 20))) for _ in range(2)), cap=40
            )
        if tick in (6, 9):
            for row in [n for n, each in enumerate(fleet.asked) if each.runs and each.home == 3]:
                fleet.evict(row)
                # at tick 6 the worker leaves, at tick 9 memory runs out
                fleet.asked[row].evictions -= tick == 6
        if tick < 30:
            fleet.workers = workers[:2] if 6 <= tick < 8 else workers
        fleet.rounds_until_settled()
        decision = fleet.decision
        runs = [row for share in decision.workers for row in share.run.tolist()]
        assert len(set(runs)) == len(runs)
        alive = {row for row, each in enumerate(fleet.asked) if not each.over}
        assert set(decision.explanations.rows.tolist()) | set(runs) == alive
        assert len(set(decision.explanations.rows.tolist())) == len(decision.explanations.rows)
        fleet.tick()
        if tick >= 12 and fleet.over:
            break
    assert fleet.over
    share = fleet.row.params.get("zeta", 1.0)
    for each in fleet.reported:
        worker, max_output = (
            workers[each.worker - 1],
            each.expected if form == "wma" else each.max_output,
        )
        assert len(each.rows) <= worker.max_running
        fits = each.tokens(max_output, worker.block_tokens) <= share * worker.kv_tokens
        assert fits or len(each.rows) == 1


@pytest.mark.parametrize("preset", BATCHED)
def test_batch_preset_serves_every_request(preset: str) -> None:
    quick = {"interval_s": 2.0} if choose(preset).interval == "load" else {}
    fleet = Fleet(preset, nodes(2, 3_000, 20), quick)
    rng = np.random.default_rng(1)
    for _ in range(20):
        fleet.ask(
            *((int(rng.integers(5, 300)), int(rng.integers(1, 40))) for _ in range(3)), cap=300
        )
        fleet.run(1)
    fleet.run(600)
    assert fleet.over
    assert {each.worker for each in fleet.reported} == {1, 2}


def test_request_too_long_for_every_worker_waits_with_reason() -> None:
    fleet = Fleet("scls", nodes(1, kv_tokens=100))
    fleet.ask((90, 20))
    reported = explanation(fleet.round().explanations, 0)
    assert reported is not None and reported.reason is WaitReason.NO_WORKER


def test_small_workers_share_batch_in_one_round() -> None:
    """The batch is cut for the large, busy worker; of three requests, two start on the small
    workers in one round."""
    small = [node(number, 20, 9, cost=COST) for number in (1, 2)]
    fleet = Fleet("abp", (*small, node(3, 10_000, 9, cost=COST)))
    fleet.ask((900, 50))
    fleet.run(1)
    fleet.ask(*[(10, 4)] * 3, cap=4)
    fleet.run(1)
    assert begun(fleet) == [(0, 3, [0]), (1, 1, [1]), (1, 2, [2])]
