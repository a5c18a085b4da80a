"""What the policies share: the longest prefix that fits, and how it is put into words.

A policy is a need (tokens required with the first k of the queue admitted, rising with k) and a
limit. All stop at the first request that does not fit, and none ever passes `max_running`.
"""

from collections.abc import Callable

import numpy as np

from services.batcher.group import Columns, Decision, GroupView
from services.core import Wait
from services.forecast import Floats, Ints

Need = Callable[[int], float]


def longest_fit(needs: Floats | Ints, limit: float, room: int) -> int:
    """How many more fit, `needs[k]` being the rising need with k admitted; at most `room`."""
    return min(room, max(0, int(np.searchsorted(needs, limit, side="right")) - 1))


def accumulate(running: Ints, queued: Ints) -> Ints:
    """Total with the first k queued admitted, for k = 0 … len(queued)."""
    totals: Ints = np.concatenate([[0], np.cumsum(queued)]) + running.sum()
    return totals


def decide(view: GroupView, admit: int, need: Need, limit: float) -> Decision:
    """The decision to admit so many, with the one exception that keeps the queue moving.

    On an idle worker the first request is admitted if it can end there alone: its need may pass
    the policy's limit, but no later round would find more room for it.
    """
    if admit == 0 and _alone(view):
        admit = 1
    return Decision(admit, float(need(admit)), _wait(view, admit, need, limit))


def _alone(view: GroupView) -> bool:
    return view.room > 0 and len(view.running) == 0 and _reach(view.queued, 0) <= view.kv_tokens


def _reach(columns: Columns, row: int) -> int:
    return int(columns.prompt[row] + columns.max_tokens[row])


def _wait(view: GroupView, admit: int, need: Need, limit: float) -> Wait | None:
    if admit == len(view.queued):
        return None
    if admit == view.room:
        return Wait(f"{len(view.running) + admit} requests run, the most this worker takes")
    return Wait(
        f"the next one would need {need(admit + 1):.0f} tokens of KV cache in all, "
        f"{limit:.0f} of {view.kv_tokens} may be planned"
    )
