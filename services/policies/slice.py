"""How many tokens one who runs may make before it is looked at again."""

from collections.abc import Callable

import numpy as np

from services.forecast import Ints
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, Jobs

Slice = Callable[[Jobs, Bools, Params], Ints]


def whole(jobs: Jobs, runs: Bools, params: Params) -> Ints:
    """All that was asked for: sequence-level scheduling."""
    return jobs.cap.copy()


def tokens(jobs: Jobs, runs: Bools, params: Params) -> Ints:
    """`slice_tokens` beyond what is there (ALGORITHMS 4). Who runs and has half a slice left
    goes on with what it has; the next half is granted in good time, so that planning never
    stalls the device."""
    slice_tokens = int(params["slice_tokens"])
    fresh = np.minimum(jobs.cap, jobs.output + slice_tokens)
    enough = runs & (jobs.limit - jobs.output > slice_tokens // 2)
    return np.where(enough, jobs.limit, np.maximum(fresh, np.where(runs, jobs.limit, 0)))


SLICES: dict[str, Slice] = {"whole": whole, "tokens": tokens}
PARAMS: dict[str, dict[str, Param]] = {
    "whole": {},
    "tokens": {"slice_tokens": Param(32, 1, 2**24)},
}
