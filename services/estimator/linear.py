"""The linear cost model of SCLS (Cheng et al., 2024, §4.2), adapted to continuous batching."""

from collections.abc import Iterable

import numpy as np
from scipy.optimize import curve_fit, nnls

from services.costs import CostModel, StepTiming
from services.forecast import Floats

SOURCE = "linear"
MIN_SAMPLES = 8  # two per coefficient
MIN_PREFILL_RATIO = 2.0  # largest over smallest prefill step: a slope needs two sizes
MIN_OWN_SHARE = 0.01  # of a column's length that is independent of the other columns
TRIMMED_SHARE = 0.05  # share of the worst samples that the start ignores
PREFILL = 1  # column of prefill tokens
RIDGE = 1e-4  # regularises colinear columns; moves a determined fit by about 1e-8
LOG_ERROR_SCALE = 0.1  # of log time: steps with larger errors have less influence
TOLERANCE = 1e-8
MIN_SHARE = 1e-3  # of the start; smaller means 0, as `curve_fit` never reaches its bounds


def fit(samples: Iterable[StepTiming]) -> CostModel | None:
    """Fits non-negative coefficients with the least relative error over positive timings; None
    while the samples do not determine all coefficients.

    They do when there are enough samples, prefill steps of more than one size, no column that is
    nearly a combination of the others (at least 1 % of its length is independent, with each step
    weighted by its time), and a positive time per prompt token. Decode steps alone would fit well
    and make prompts free.

    The fit has two parts. The start is a convex problem and solved exactly: non-negative least
    squares with each step weighted by its measured time (bounded below, so that near-zero times of
    a broken clock do not dominate), then once more without the worst 5 %, weighted by the fitted
    time. From there SciPy's `curve_fit`, which SCLS uses, minimises log(fitted / measured) with the
    Cauchy loss: noise is a symmetric factor, and warm-ups and host pauses have little influence
    however long they are. Coefficients that are 0 at the start stay 0. Errors cover all samples.
    O(samples): about 6 ms for 2,000.
    """
    rows = np.array(
        [(1, s.prefill_tokens, s.decode_seqs, s.context_tokens, s.elapsed_s) for s in samples],
        float,
    ).reshape(-1, 5)
    if len(rows) < MIN_SAMPLES:
        return None
    work, elapsed = rows[:, :4], rows[:, 4]
    scale = np.maximum(elapsed, 0.5 * np.quantile(elapsed, 0.1))
    if not _determine(work, scale):
        return None
    found = _curve(work, elapsed, _start(work, elapsed, scale))
    error = np.abs(work @ found - elapsed) / elapsed
    base_s, prefill_token_s, decode_seq_s, context_token_s = (float(c) for c in found)
    if prefill_token_s <= 0:
        return None
    return CostModel(
        base_s,
        prefill_token_s,
        decode_seq_s,
        context_token_s,
        source=SOURCE,
        error_p50=float(np.quantile(error, 0.5)),
        error_p90=float(np.quantile(error, 0.9)),
        samples=len(rows),
    )


def _start(work: Floats, elapsed: Floats, scale: Floats) -> Floats:
    """Initial coefficients; decides which are 0."""
    found = _solve(work, elapsed, scale)
    fitted = _positive(work @ found)
    miss = np.abs(np.log(fitted / elapsed))
    kept = miss <= np.quantile(miss, 1 - TRIMMED_SHARE)
    return _solve(work[kept], elapsed[kept], fitted[kept])


def _curve(work: Floats, elapsed: Floats, start: Floats) -> Floats:
    """Refines the positive coefficients, relative to their start, with `curve_fit`."""
    some = start > 0
    part = work[:, some] * start[some]
    has_work = part.sum(axis=1) > 0  # steps with no work in the remaining columns are skipped
    part, measured = part[has_work], np.log(elapsed[has_work])
    if len(part) <= part.shape[1]:
        return start
    try:
        shares, _ = curve_fit(
            _log_s, part.T, measured, p0=np.ones(part.shape[1]), jac=_slopes,
            bounds=(0.0, np.inf), loss="cauchy", f_scale=LOG_ERROR_SCALE,
            ftol=TOLERANCE, xtol=TOLERANCE, gtol=TOLERANCE, check_finite=False,
        )  # fmt: skip
    except RuntimeError:  # no convergence: the start is a valid fit
        return start
    found = start.copy()
    found[some] *= np.where(shares > MIN_SHARE, shares, 0.0)
    return found


def _log_s(parts: Floats, *shares: float) -> Floats:
    return np.asarray(np.log(_positive(np.array(shares) @ parts)), float)


def _slopes(parts: Floats, *shares: float) -> Floats:
    return np.asarray((parts / _positive(np.array(shares) @ parts)).T, float)


def _determine(work: Floats, scale: Floats) -> bool:
    """Returns whether the steps determine the four coefficients."""
    return (
        _varies(work[:, PREFILL])
        and float(_own_shares(work / scale[:, None]).min()) > MIN_OWN_SHARE
    )


def _varies(column: Floats) -> bool:
    some = column[column > 0]
    return bool(len(some) and some.max() >= MIN_PREFILL_RATIO * some.min())


def _own_shares(columns: Floats) -> Floats:
    """Share of each column's length that is orthogonal to all others.

    The inverse Gram matrix of unit columns has 1 / share² on its diagonal.
    """
    length = np.linalg.norm(columns, axis=0)
    if not length.all():
        return np.zeros(columns.shape[1])
    unit = columns / length
    values, vectors = np.linalg.eigh(unit.T @ unit)
    inverse = (vectors**2 / np.maximum(values, np.finfo(float).eps)).sum(axis=1)
    return np.asarray(inverse**-0.5, float)


def _solve(work: Floats, elapsed: Floats, scale: Floats) -> Floats:
    """argmin over c ≥ 0 of Σ ((work·c − elapsed) / scale)², with columns scaled to unit length."""
    weighted = work / scale[:, None]
    length = _positive(np.linalg.norm(weighted, axis=0))
    matrix = np.vstack([weighted / length, RIDGE * np.eye(work.shape[1])])
    target = np.concatenate([elapsed / scale, np.zeros(work.shape[1])])
    solution, _ = nnls(matrix, target)
    return np.asarray(solution / length, float)


def _positive(values: Floats) -> Floats:
    return np.maximum(values, np.finfo(float).tiny)
