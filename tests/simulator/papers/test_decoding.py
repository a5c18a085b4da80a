"""Decoding of a burst: a hand-worked run, and a worker that goes token by token."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.papers.past_future.admission import NO_KV, Admission, Foresight, Rules, Settings
from simulator.papers.past_future.decoding import Measured, decode
from simulator.papers.past_future.queue import Queue
from simulator.workload.workload import Workload

RULES = {
    "optimum": Rules("past_future", {"reserved": 0.0, "draws": 1}, Foresight.TRUE_LENGTHS),
    "past-future": Rules("past_future", {"reserved": 0.05, "draws": 3, "statistic": 1}),
    "aggressive": Rules("aggressive", {"watermark": 0.95}, Foresight.MAX_TOKENS),
    "conservative": Rules("conservative", {"overcommit": 1.5}, Foresight.MAX_TOKENS),
    "curve": Rules("curve", {"eviction_share": 0.1}, victim="relief"),
}
SMALL = Settings(kv_tokens=60, interval_steps=4, max_tokens=20, window=8, prior=2)


def burst(*lengths: tuple[int, int]) -> Workload:
    """Requests of (input, output) tokens, all queued at the start."""
    inputs, outputs = np.array(lengths, np.int64).T
    return Workload("burst", np.zeros(len(lengths)), inputs, outputs)


def admission(requests: Workload, rules: Rules, worker: Settings) -> Admission:
    return Admission(requests, rules, worker, np.random.default_rng(1))


@dataclass
class StepByStep:
    """A worker that makes one token at a time.

    It shares only the decision with the worker under test, and takes one whenever one is due.
    Its future memory is the most that a copy of its batch holds while it runs to the end.
    """

    requests: Workload
    admission: Admission
    worker: Settings
    newest: bool
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    total: dict[str, int] = field(default_factory=dict)

    def run(self) -> Measured:
        self.total = dict.fromkeys(Measured.__slots__, 0)
        self.waiting = list(range(len(self.requests)))
        since = 0
        while True:
            if since == self.worker.interval_steps or not self.running:
                self.decide()
                since = 0
            if not self.waiting:
                return Measured(**self.total)
            while sum(self.held(row) + 1 for row in self.running) > self.worker.kv_tokens:
                self.evict()
            self.step()
            since += 1

    def held(self, row: int) -> int:
        return int(self.requests.input_tokens[row]) - NO_KV + int(self.admission.jobs.output[row])

    def decide(self) -> None:
        held = sum(map(self.held, self.running))
        queue = Queue(self.admission.jobs)
        queue.pop(len(self.requests))
        for row in reversed(self.waiting):
            queue.put_back(row)
        answer = self.admission.admit(np.array(self.running, np.int64), held, queue)
        for row in self.waiting[: answer.count]:
            self.admission.jobs.admitted[row] = self.admission.jobs.admitted.max() + 1
        self.running += self.waiting[: answer.count]
        del self.waiting[: answer.count]
        self.total["decisions"] += 1
        self.total["future_tokens"] += self.peak()

    def peak(self) -> int:
        length, most = self.requests.output_tokens, 0
        batch = {row: int(self.admission.jobs.output[row]) for row in self.running}
        while batch:
            batch = {row: made + 1 for row, made in batch.items()}
            kept = sum(int(self.requests.input_tokens[r]) - NO_KV + n for r, n in batch.items())
            most = max(most, kept)
            batch = {row: made for row, made in batch.items() if made < length[row]}
        return most

    def evict(self) -> None:
        """Evicts the newest request, or the first in the policy's own order."""
        place = -1
        if not self.newest:
            place = int(self.admission.victims(np.array(self.running, np.int64))[0])
        self.waiting.insert(0, self.running.pop(place))
        self.total["evictions"] += 1
        self.admission.count_evictions(1)

    def step(self) -> None:
        for row in self.running:
            self.admission.jobs.output[row] += 1
        self.total["steps"] += 1
        self.total["held_tokens"] += sum(map(self.held, self.running))
        length, made = self.requests.output_tokens, self.admission.jobs.output
        ended = [row for row in self.running if made[row] == length[row]]
        if ended:
            self.admission.learn(np.array(ended))
        self.running = [row for row in self.running if row not in ended]


lengths = st.tuples(st.integers(1, 25), st.integers(1, 30))
REQUESTS = st.lists(lengths, min_size=1, max_size=25).map(lambda drawn: burst(*drawn))


@given(
    requests=REQUESTS,
    name=st.sampled_from(list(RULES)),
    kv_tokens=st.integers(54, 150),
    interval=st.integers(1, 12),
)
@settings(max_examples=60)
def test_decoding_in_jumps_equals_single_steps(
    requests: Workload, name: str, kv_tokens: int, interval: int
) -> None:
    rules = RULES[name]
    worker = Settings(kv_tokens, interval, max_tokens=20, window=8, prior=2)
    jumps = decode(requests, admission(requests, rules, worker), worker)
    newest = rules.victim == "newest"
    stepped = StepByStep(requests, admission(requests, rules, worker), worker, newest).run()
    assert jumps == stepped


def test_decoding_matches_transcript_of_aggressive_admission() -> None:
    """9 tokens of memory, a decision every 2 steps. A request holds prompt + output − 1.

    0  decision 1: A and B hold 2 + 2; C would make 11 and waits. Most to come: 5 + 5
    1  A and B hold 3 + 3
    2  A and B hold 4 + 4; decision 2: C would make 15. Most to come: 5 + 5
    3  10 would not fit: B is evicted with two tokens; A holds 5
    4  A holds 6 and ends; decision 3: B holds 4, C would make 11. Most to come: 5
    5  B holds 5 and ends; decision 4, because none runs: C and D hold 7 + 1, and the queue is
       empty. Most to come: 8 + 2
    """
    a, b, c, d = (3, 4), (3, 3), (8, 1), (2, 1)
    requests = burst(a, b, c, d)
    worker = Settings(kv_tokens=9, interval_steps=2)
    rules = Rules("aggressive", {"watermark": 1.0}, Foresight.MAX_TOKENS)
    measured = decode(requests, admission(requests, rules, worker), worker)
    assert measured == Measured(
        steps=5,
        decisions=4,
        evictions=1,
        held_tokens=6 + 8 + 5 + 6 + 5,
        future_tokens=10 + 10 + 5 + 10,
    )


def test_request_larger_than_memory_is_refused() -> None:
    requests = burst((50, 20))
    with pytest.raises(ValueError, match="needs 69 KV tokens, the worker has 60"):
        decode(requests, admission(requests, RULES["optimum"], SMALL), SMALL)
