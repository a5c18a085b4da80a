"""The linear cost model: SCLS' estimator (papers/003 §4.1) in its continuous-batching form."""

from collections.abc import Iterable

import numpy as np
from scipy.optimize import nnls

from services.core import CostModel, StepTiming
from services.forecast import Floats

SOURCE = "linear"
FEWEST_SAMPLES = 8  # two a coefficient; fewer would be fitted to noise
TRIMMED = 0.05  # share of worst samples left out of a re-fit: pauses of the host, not of the model
REFITS = 2
RIDGE = 1e-4  # pulls colinear columns together, moves a determined fit by about 1e-8


def fit(samples: Iterable[StepTiming], version: int) -> CostModel | None:
    """Non-negative coefficients of least relative error over positive timings; None if too few.

    The first fit weighs each step by its own measured time, bounded below so that a broken
    clock's near-zeros cannot outweigh all others. Each re-fit leaves out the worst 5 % by
    |log(fitted / measured)| and weighs by the fitted time, which noise does not bias downward.
    Errors are over all samples. O(samples) a fit: about 2 ms at 2,000.
    """
    rows = np.array(
        [(1, s.prefill_tokens, s.decode_seqs, s.context_tokens, s.elapsed_s) for s in samples],
        float,
    ).reshape(-1, 5)
    if len(rows) < FEWEST_SAMPLES:
        return None
    work, elapsed = rows[:, :4], rows[:, 4]
    found = _solve(work, elapsed, np.maximum(elapsed, 0.5 * np.quantile(elapsed, 0.1)))
    for _ in range(REFITS):
        fitted = _positive(work @ found)
        miss = np.abs(np.log(fitted / elapsed))
        kept = miss <= np.quantile(miss, 1 - TRIMMED)
        found = _solve(work[kept], elapsed[kept], fitted[kept])
    error = np.abs(work @ found - elapsed) / elapsed
    base_s, prefill_token_s, decode_seq_s, context_token_s = (float(c) for c in found)
    return CostModel(
        base_s,
        prefill_token_s,
        decode_seq_s,
        context_token_s,
        version=version,
        source=SOURCE,
        error_p50=float(np.quantile(error, 0.5)),
        error_p90=float(np.quantile(error, 0.9)),
        samples=len(rows),
    )


def _solve(work: Floats, elapsed: Floats, scale: Floats) -> Floats:
    """argmin over c ≥ 0 of Σ ((work·c − elapsed) / scale)², columns brought to unit length."""
    weighted = work / scale[:, None]
    length = _positive(np.linalg.norm(weighted, axis=0))
    matrix = np.vstack([weighted / length, RIDGE * np.eye(work.shape[1])])
    target = np.concatenate([elapsed / scale, np.zeros(work.shape[1])])
    solution, _ = nnls(matrix, target)
    return np.asarray(solution / length, float)


def _positive(values: Floats) -> Floats:
    return np.maximum(values, np.finfo(float).tiny)
