"""An engine of 50 lines that goes step by step, to write request logs with known costs."""

from dataclasses import dataclass

import numpy as np

from services.costs import CostModel
from simulator.hardware.request_log import RequestLog


@dataclass
class Sequence:
    row: int
    prompt: int
    output: int
    done: int = 0  # output tokens
    computed: int = 0  # tokens whose KV is held

    @property
    def needed(self) -> int:
        """Tokens to compute before the next one can be drawn."""
        return self.prompt + self.done


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
    rng: np.random.Generator | None = None,
) -> tuple[RequestLog, set[int]]:
    """The log of first-come-first-served continuous batching with prompts in chunks, and the rows
    that were evicted after their first token. When memory is short the newest is evicted, and
    recomputed later."""
    rng = rng or np.random.default_rng(0)
    waiting = [Sequence(i, int(p), int(o)) for i, (p, o) in enumerate(zip(prompts, outputs))]  # noqa: B905
    running: list[Sequence] = []
    times = np.full((3, len(waiting)), np.nan)  # scheduled, first token, last token
    evicted: set[int] = set()
    now = 0.0
    while waiting or running:
        if not running:
            now = max(now, float(arrival_s[waiting[0].row]))
        held = sum(s.needed + 1 for s in running)
        while held > kv_tokens:
            victim = running.pop()
            victim.computed, held = 0, held - victim.needed - 1
            waiting.insert(0, victim)
            if victim.done:
                evicted.add(victim.row)
        room = budget - sum(s.needed - s.computed == 1 for s in running)
        while waiting and len(running) < max_running and arrival_s[waiting[0].row] <= now:
            if held + waiting[0].needed + 1 > kv_tokens or room <= 0:
                break
            running.append(waiting.pop(0))
            held += running[-1].needed + 1
            times[0, running[-1].row] = np.nanmin([times[0, running[-1].row], now])
            room -= running[-1].needed
        prefill = decode = context = 0
        left = budget
        for sequence in running:
            missing = sequence.needed - sequence.computed
            part = min(missing, left) if sequence.done == 0 or missing > 1 else 1
            sequence.computed += part
            left -= part
            context += sequence.computed if part else 0
            if sequence.done and missing == 1:
                decode += 1
            else:
                prefill += part
        now += cost.step_s(prefill, decode, context) * float(np.exp(noise * rng.normal()))
        for sequence in running:
            if sequence.computed == sequence.needed:
                sequence.done += 1
                if sequence.done == 1:
                    times[1, sequence.row] = now
                times[2, sequence.row] = now
        running = [s for s in running if s.done < s.output]
    return RequestLog(prompts.astype(float), outputs.astype(float), *times), evicted
