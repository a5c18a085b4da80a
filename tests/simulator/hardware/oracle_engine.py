"""An engine of 80 lines that goes step by step, to write request logs with known costs."""

from dataclasses import dataclass, field

import numpy as np

from services.costs import CostModel
from simulator.hardware.request_log import RequestLog


@dataclass
class Sequence:
    """`done` output tokens; KV of `computed` tokens is held."""

    row: int
    arrival_s: float
    prompt: int
    output: int
    done: int = 0
    computed: int = 0

    @property
    def needed(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return self.prompt + self.done


@dataclass
class OracleEngine:
    """First-come-first-served continuous batching with prompts in chunks. When memory is short, the
    newest sequence is evicted, and recomputed later."""

    cost: CostModel
    waiting: list[Sequence]
    max_running: int
    budget: int
    kv_tokens: int
    noise: float
    running: list[Sequence] = field(default_factory=list)
    evicted: set[int] = field(default_factory=set)
    now: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        # scheduled, first token, last token
        self.times = np.full((3, len(self.waiting)), np.nan)

    @property
    def held(self) -> int:
        return sum(s.needed + 1 for s in self.running)

    def evict(self) -> None:
        while self.held > self.kv_tokens:
            victim = self.running.pop()
            victim.computed = 0
            self.waiting.insert(0, victim)
            if victim.done:
                self.evicted.add(victim.row)

    def admit(self) -> None:
        if not self.running:
            self.now = max(self.now, self.waiting[0].arrival_s)
        held = self.held
        room = self.budget - sum(s.needed - s.computed for s in self.running)
        while self.waiting and self.waiting[0].arrival_s <= self.now:
            first = self.waiting[0]
            full = len(self.running) >= self.max_running or room <= 0
            if full or held + first.needed + 1 > self.kv_tokens:
                break
            self.running.append(self.waiting.pop(0))
            held, room = held + first.needed + 1, room - first.needed
            if np.isnan(self.times[0, first.row]):
                self.times[0, first.row] = self.now

    def compute(self) -> None:
        prefill = decode = context = 0
        left = self.budget
        for sequence in self.running:
            missing = sequence.needed - sequence.computed
            part = min(missing, left)
            sequence.computed += part
            left -= part
            context += sequence.computed if part else 0
            decodes = sequence.done > 0 and missing == 1
            decode, prefill = decode + decodes, prefill + (0 if decodes else part)
        noise = float(np.exp(self.noise * self.rng.normal()))
        self.now += self.cost.step_s(prefill, decode, context) * noise

    def emit(self) -> None:
        for sequence in self.running:
            if sequence.computed == sequence.needed:
                sequence.done += 1
                self.times[1 if sequence.done == 1 else 2, sequence.row] = self.now
                self.times[2, sequence.row] = self.now
        self.running = [s for s in self.running if s.done < s.output]


def serve(
    cost: CostModel,
    arrival_s: np.ndarray,
    prompts: np.ndarray,
    outputs: np.ndarray,
    *,
    max_running: int = 32,
    budget: int = 2_048,
    kv_tokens: int = 10**9,
    noise: float = 0.0,
) -> tuple[RequestLog, set[int]]:
    """The log of a run, and the rows that were evicted after their first token."""
    rows = zip(arrival_s, prompts, outputs, strict=True)
    waiting = [Sequence(i, float(a), int(p), int(o)) for i, (a, p, o) in enumerate(rows)]
    engine = OracleEngine(cost, waiting, max_running, budget, kv_tokens, noise)
    while engine.waiting or engine.running:
        engine.evict()
        engine.admit()
        engine.compute()
        engine.emit()
    return RequestLog(prompts.astype(float), outputs.astype(float), *engine.times), engine.evicted
