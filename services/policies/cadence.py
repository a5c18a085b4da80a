"""The cadence of plans: how many steps a worker makes from one plan to the next.

A plan is in force until the next one. At GPU rates that is many steps, because a round takes more
time than a step, and the scheduler rests between rounds. Slices must last for it, and memory must
be planned for the time after it.
"""

from collections.abc import Mapping
from math import inf

from services.policies.memory import PolicyMemory
from services.policies.snapshot import Snapshot, WorkerSnapshot

INTERVAL_S, BEGAN_S = "plan_interval_s", "round_began_s"
WEIGHT = 0.1  # of the latest interval in the mean
LONGEST_S = 1.0  # of an interval; a longer one had nothing to decide
SHORTEST_STEP_S = 1e-6


def measure_cadence(snapshot: Snapshot, memory: PolicyMemory) -> PolicyMemory:
    """Averages the time from a decision about a worker to the next, exponentially and from 0 on, in
    the policies' memory. An interval counts only if a request waits through all of it: another one
    lasts until the next event, whenever that comes."""
    began_s = memory.number(BEGAN_S, -inf)
    if (snapshot.live.since_s[: len(snapshot.queued)] <= began_s).any():
        mean_s = memory.number(INTERVAL_S)
        turns = len(snapshot.workers) / max(1, len(snapshot.deciding))
        interval_s = min((snapshot.now - began_s) * turns, LONGEST_S)
        memory = memory.with_numbers(**{INTERVAL_S: mean_s + WEIGHT * (interval_s - mean_s)})
    return memory.with_numbers(**{BEGAN_S: snapshot.now})


def steps_to_next_plan(
    numbers: Mapping[str, float], worker: WorkerSnapshot, seqs: int, context_tokens: float
) -> float:
    """Decode steps of this batch until the next plan, by the memory's `numbers`, or with
    speculation the tokens that a request gets by them; 0 until a request has waited."""
    step_s = max(SHORTEST_STEP_S, worker.cost.step_s(0, seqs, context_tokens))
    return numbers.get(INTERVAL_S, 0.0) * worker.cost.tokens_per_step / step_s
