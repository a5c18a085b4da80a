"""What requests did since the last round, in engine iterations.

The papers count and decide once per iteration. Rounds are less frequent, so the work between two
rounds is counted at the second. A request that ran made one token per iteration, and its missing KV
in one more. A waiting request saw as many iterations as fit into the time at the fleet's pace.
"""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.pace import Pace
from services.policies.snapshot import Bools, Snapshot

MADE, HELD = "made", "held"
ROUND_S = "ranked_s"


@dataclass(frozen=True, slots=True)
class IterationProgress:
    """Progress since the last round, parallel to the requested rows: `tokens` generated, KV tokens
    `prefilled`, whether the request `ran`, and the `waited_s` of queued requests. `seen` tells
    whether the request existed at the last round; of new ones only the waiting counts."""

    seen: Bools
    ran: Bools
    tokens: Floats
    prefilled: Floats
    waited_s: Floats
    columns: dict[str, Floats]

    @property
    def iterations(self) -> Floats:
        return self.tokens + (self.prefilled > 0)


def progress(
    snapshot: Snapshot, memory: PolicyMemory, split: int
) -> tuple[IterationProgress, PolicyMemory]:
    """Progress of the live requests, queued before `split`, and the updated memory. The caller
    stores the result's columns. O(jobs)."""
    jobs = snapshot.live
    output, held = jobs.output, jobs.held
    made, had = memory.recall((MADE, HELD), jobs.rows, jobs.serial)
    seen = made > 0
    tokens = np.where(seen, np.maximum(output + 1 - made, 0.0), 0.0)
    prefilled = np.where(seen, np.maximum(held - had - tokens, 0.0), 0.0)
    ran = tokens > 0
    ran[split:] = True
    since_s = jobs.since_s
    last_s = np.maximum(since_s, memory.number(ROUND_S, -np.inf))
    waited_s = np.maximum(snapshot.now - np.where(seen, last_s, since_s), 0.0)
    waited_s[split:] = 0.0
    columns = {MADE: output + 1.0, HELD: held.astype(float)}
    found = IterationProgress(seen, ran, tokens, prefilled, waited_s, columns)
    return found, memory.with_numbers(**{ROUND_S: snapshot.now})


def served_s(done: IterationProgress, pace: Pace, step_s: float) -> Floats:
    """Clock time during which each request ran since the last round."""
    return done.tokens * step_s + done.prefilled * pace.prefill_token_s
