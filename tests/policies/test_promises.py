"""Forms that guarantee that no request is evicted, on a worker that grows token by token."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.forecast import from_lengths
from services.policies.decide import decide
from services.policies.form.sums import SumDemand
from services.policies.memory import PolicyMemory
from services.policies.preset import Preset, choose
from services.policies.snapshot import NOWHERE, Snapshot, WorkerSnapshot
from tests.examples import examples
from tests.policies.made_snapshots import demanded, fill_queue, jobs, node, table
from tests.policies.test_decide import check
from tests.scheduler.load.scheduler_load import Load
from tests.scheduler.load.test_load import bimodal

# Three answers outlast the others: the plan interval then lengthens their slices beyond the memory.
OUTLASTING = [(1, 1, 0), (1, 30, 0), (1, 30, 0), (21, 30, 0), (1, 6, 0), (1, 6, 0), (30, 1, 7)]

FIRM: dict[str, dict[str, object]] = {
    "conservative": {"form": "conservative"},
    "fixed": {"form": "fixed", "batch_size": 3},
    "sliced, in halves": {"form": "sliced", "slice": "tokens", "slice_tokens": 8},
    "sliced, in turns": {"form": "sliced", "slice": "turns", "slice_tokens": 8},
    "sliced, preemptive": {
        "form": "sliced", "slice": "tokens", "slice_tokens": 8, "order": "alise", "base_s": 0.001,
    },
}  # fmt: skip


@dataclass
class Ask:
    prompt: int
    length: int
    cap: int
    output: int = 0
    limit: int = 0
    runs: bool = False
    admitted: int = 0
    preemptions: int = 0


@dataclass
class GrowingWorker:
    """One worker; a paused request loses its KV. `most` is the peak of held tokens."""

    worker: WorkerSnapshot
    asks: list[Ask]
    most: int = 0
    rounds: int = 0
    ended: int = 0

    def snapshot(self) -> Snapshot:
        asks, rows = self.asks, range(len(self.asks))
        runs = np.array([ask.runs for ask in asks], bool)
        context = np.array([ask.prompt + ask.output for ask in asks], np.int64)
        block = self.worker.block_tokens
        made = jobs(
            len(asks),
            home=np.where(runs, self.worker.number, NOWHERE),
            prompt=[ask.prompt for ask in asks],
            output=[ask.output for ask in asks],
            held=np.where(runs, context, 0),
            blocks=np.where(runs, -(-context // block), 0),
            limit=[ask.limit for ask in asks],
            cap=[ask.cap for ask in asks],
            admitted=[ask.admitted for ask in asks],
            preemptions=[ask.preemptions for ask in asks],
            total=[float(max(ask.cap / 2, ask.output)) for ask in asks],
            arrival_s=[float(row) for row in rows],
            since_s=[float(row) for row in rows],
        )
        live = np.array([ask.output < ask.length for ask in asks], bool)
        queued, running = np.flatnonzero(live & ~runs), np.flatnonzero(live & runs)
        forecasts = table(from_lengths([3, 9, 30], 100, "h"))
        return Snapshot(
            float(len(asks) + self.rounds), made, queued, running, (self.worker,), forecasts
        )

    def carry_out(self, preset: Preset, memory: PolicyMemory) -> PolicyMemory:
        self.rounds += 1
        snapshot = self.snapshot()
        decision = decide(snapshot, preset, memory, np.random.default_rng(0), self.rounds)
        check(snapshot, decision, preset)
        (share,) = decision.workers
        for row in share.pause.tolist():
            self.asks[row].runs = False
            self.asks[row].preemptions += 1
        for row, limit in zip(share.run.tolist(), share.limits.tolist(), strict=True):
            ask = self.asks[row]
            ask.admitted = ask.admitted if ask.runs else self.rounds
            ask.runs, ask.limit = True, limit
        return decision.memory

    def step(self) -> None:
        """Each running request generates a token within its limit; ended requests leave."""
        here = [ask for ask in self.asks if ask.runs]
        for ask in here:
            ask.output = min(ask.output + 1, ask.limit)
        block = self.worker.block_tokens
        held = sum(-(-(ask.prompt + ask.output) // block) * block for ask in here)
        self.most = max(self.most, held)
        for ask in here:
            ask.runs = ask.output < ask.length


asked = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=12
)


@pytest.mark.parametrize("name", FIRM)
@settings(max_examples=examples(50))
@given(asked, st.sampled_from([1, 16]), st.sampled_from([112, 160, 320]), st.integers(1, 9))
@example(rows=OUTLASTING, block=1, kv_tokens=112, stride=5)
def test_firm_forms_never_exceed_memory(
    name: str, rows: list[tuple[int, int, int]], block: int, kv_tokens: int, stride: int
) -> None:
    """A round runs every `stride` tokens. Each request alone fits 112 tokens."""
    preset = choose("fcfs", FIRM[name])
    asks = [Ask(prompt, length, length + spare) for prompt, length, spare in rows]
    dumb, memory = (
        GrowingWorker(node(1, kv_tokens, 8, block_tokens=block), asks),
        PolicyMemory(),
    )
    for _ in range(2_000):
        memory = dumb.carry_out(preset, memory)
        for _ in range(stride):
            dumb.step()
        if all(ask.output >= ask.length for ask in asks):
            break
    assert all(ask.output == ask.length for ask in asks)
    assert dumb.most <= kv_tokens


def test_growing_worker_detects_overcommitted_memory() -> None:
    """Only the prompts fit, so the worker exceeds its memory."""
    dumb = GrowingWorker(node(1, 112, 8), [Ask(10, 40, 40) for _ in range(8)])
    dumb.carry_out(choose("fcfs"), PolicyMemory())
    for _ in range(40):
        dumb.step()
    assert dumb.most == 8 * 50


@pytest.mark.parametrize("name", FIRM)
def test_scheduler_with_firm_form_never_evicts_under_load(name: str) -> None:
    """Four of five outputs are short, the fifth twenty times as long. A quarter of the requests
    that would run without a limit fit."""
    reported = Load("fcfs", list(bimodal(requests=80)), 3_000, 64, **FIRM[name]).run()
    assert (len(reported.ended_s), reported.evictions) == (80, 0)


def test_scheduler_with_default_form_evicts_under_same_load() -> None:
    assert Load("fcfs", list(bimodal(requests=80)), 3_000).run().evictions > 0


# Slices: worked examples


def test_sliced_form_requires_room_for_next_slice() -> None:
    """Slices have 8 tokens, and 90 of 100 tokens of memory are usable. Request 1 is within its
    slice and counts 10 + 12. Request 2 has exhausted its slice and needs 20 + 8 + 8: 58 in all.
    Request 3 would need 20 + 10 + 8: 96 in all. Request 4 waits and needs 9, but must not pass
    request 3."""
    made = jobs(
        4,
        home=[1, 1, 1, NOWHERE],
        prompt=[10, 20, 20, 1],
        output=[4, 8, 10, 0],
        limit=[12, 8, 10, 0],
        cap=[50, 50, 50, 50],
    )
    runs, limits = np.array([True, True, True, False]), np.array([12, 16, 18, 8])
    worker = node(kv_tokens=100)
    demand = demanded("sliced", made, worker, table(), {}, runs=runs, limits=limits)
    assert (demand.held.tolist(), demand.limits[0]) == ([22, 36, 38, 9], 90)
    assert demand.due is not None
    assert demand.due.tolist() == [False, True, True, False]
    reported = fill_queue(runs, demand, 99, alone=True)
    assert reported.runs_next.tolist() == [True, True, False, False]
    assert reported.peaks[0] == 58
    roomy = demanded("sliced", made, worker, table(), {"zeta": 0.96}, runs=runs, limits=limits)
    assert fill_queue(runs, roomy, 99, alone=True).runs_next.tolist() == [True, True, True, False]


def due(held: list[float], limit: float, asks: list[bool], runs: list[bool]) -> list[int]:
    demand = SumDemand(np.array(held), np.array([limit]), due=np.array(asks))
    run = fill_queue(np.array(runs), demand, 99, alone=False).runs_next
    return [int(i) for i in np.flatnonzero(run)]


def test_fill_pauses_exhausted_slice_without_room() -> None:
    """Behind a request that does not fit, a running request continues if there is room; a waiting
    one is not admitted."""
    all_three, last = [True] * 3, [False, False, True]
    assert due([40, 40, 40], 100, all_three, all_three) == [0, 1]
    assert due([40, 70, 40], 100, all_three, all_three) == [0, 2]
    assert due([40, 70, 40], 100, [True, True, False], [True, True, False]) == [0]
    assert due([40, 40, 40], 100, last, all_three) == [0, 1]
    # the first two are within their slices
    assert due([80, 80, 80], 100, last, all_three) == [0, 1]


def test_fill_keeps_first_request_of_otherwise_idle_worker() -> None:
    assert due([101, 50], 100, [True, True], [True, True]) == [0]
    assert due([101, 50], 100, [False, True], [True, True]) == [0]
