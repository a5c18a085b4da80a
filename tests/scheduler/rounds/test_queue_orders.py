"""The queue orders of workers after a round, against their definition."""

import pytest

from benchmarks.harness.rounds import BusyScheduler, RoundTimes, arrange_in_process
from services.core import QueueOrder
from services.policies.order.ranking import Ranking
from services.scheduler.core.jobs import WorkerJobs
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import RequestPhase
from services.scheduler.core.rounds import QueueOrders


def defined_order(ledger: Ledger, ranking: Ranking, worker: WorkerJobs) -> QueueOrder:
    """Running requests by key, then waiting ones with KV here, each with the remaining time of the
    requests with smaller keys: here in full, and a share of those without KV."""
    columns = ledger.board.jobs
    first: list[tuple[float, int, str, float]] = []
    resting: list[tuple[float, int, str, float]] = []
    ahead: list[tuple[float, float]] = []
    for at, row in enumerate(ranking.rows.tolist()):
        phase, key = ledger.board.phase[row], float(ranking.key[at])
        here = columns.home[row] == worker.number
        entry = key, int(columns.serial[row]), str(ledger.board.names[row])
        remaining_s = float(ranking.remaining_s[at])
        if phase == RequestPhase.RUNNING and here:
            first.append((*entry, 0.0))
            ahead.append((key, remaining_s))
        elif phase == RequestPhase.QUEUED and here and columns.held[row] > 0:
            resting.append((*entry, float(ranking.lift_s[at])))
            ahead.append((key, remaining_s))
        elif phase == RequestPhase.QUEUED and columns.held[row] == 0:
            ahead.append((key, remaining_s / len(ledger.workers)))
    pairs = [(name, 0.0) for _, _, name, _ in sorted(first)]
    for key, _, name, lift_s in sorted(resting):
        pairs.append((name, min(sum(s for other, s in ahead if other < key), lift_s)))
    return QueueOrder.of(pairs) if pairs else QueueOrder()


@pytest.mark.parametrize("workers", [1, 3])
def test_queue_orders_are_as_defined(workers: int):
    scheduler = BusyScheduler("foretoken", 48, 300, workers=workers)
    ledger, resting = scheduler.state.ledger, 0
    for _ in range(12):
        scheduler.turn(arrange_in_process, RoundTimes())
        ranking = scheduler.state.rounds.ranking
        assert ranking is not None
        numbers = [worker.number for worker in ledger.workers.values()]
        orders = QueueOrders(ledger, ranking, numbers)
        for worker in ledger.workers.values():
            found, expected = (
                orders.for_worker(worker.number),
                defined_order(ledger, ranking, worker),
            )
            alone = QueueOrders(ledger, ranking, [worker.number])
            assert alone.for_worker(worker.number).request_ids == expected.request_ids
            assert alone.for_worker(worker.number).wait_s == pytest.approx(expected.wait_s)
            assert found.request_ids == expected.request_ids
            assert found.wait_s == pytest.approx(expected.wait_s)
            resting += sum(wait_s > 0 for wait_s in found.wait_s)
    assert resting
