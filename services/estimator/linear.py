"""The linear cost model: SCLS' estimator (papers/003 §4.2) in its continuous-batching form."""

from collections.abc import Iterable

import numpy as np
from scipy.optimize import curve_fit, nnls

from services.costs import CostModel, StepTiming
from services.forecast import Floats

SOURCE = "linear"
FEWEST_SAMPLES = 8  # two a coefficient; fewer would be fitted to noise
SPREAD = 2.0  # largest over smallest step that reads prompts: a slope needs two sizes
OWN_SHARE = 0.01  # of a column's length that the other columns do not explain; 0 if colinear
TRIMMED = 0.05  # share of worst samples that the start is found without
PREFILL = 1  # its column of the work
RIDGE = 1e-4  # pulls colinear columns together, moves a determined fit by about 1e-8
USUAL_MISS = 0.1  # of log time, some 10 %: beyond it a step counts less the further off it is
TOLERANCE = 1e-8
NOTHING = 1e-3  # of its start; `curve_fit` stays off its bounds, where this means 0


def fit(samples: Iterable[StepTiming], version: int) -> CostModel | None:
    """Non-negative coefficients of least relative error over positive timings; None while the
    samples do not determine each of them.

    They do when there are enough, when prompts were read in steps of more than one size, when no
    column of the work is all but a sum of the others (a hundredth of its length, each step
    weighed by its time, is its own), and when noise leaves a prompt's token some time. A handful
    of decode steps would fit well, and say that prompts are free.

    Two parts. Where to start is a convex problem, so it is solved exactly: non-negative least
    squares, each step weighed by its own measured time (bounded below, so that a broken clock's
    near-zeros cannot outweigh all others), and once more without the worst 5 %, weighed by the
    fitted time. From there SciPy's `curve_fit`, which SCLS uses, minimises log(fitted / measured)
    by Cauchy's loss: noise is a factor and so has no side there, and a warm-up or a pause of the
    host, however long, pulls ever less. It keeps at 0 what the start has at 0, where a bound
    would end near it. Errors are over all samples. O(samples): some 6 ms at 2,000.
    """
    rows = np.array(
        [(1, s.prefill_tokens, s.decode_seqs, s.context_tokens, s.elapsed_s) for s in samples],
        float,
    ).reshape(-1, 5)
    if len(rows) < FEWEST_SAMPLES:
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
        version=version,
        source=SOURCE,
        error_p50=float(np.quantile(error, 0.5)),
        error_p90=float(np.quantile(error, 0.9)),
        samples=len(rows),
    )


def _start(work: Floats, elapsed: Floats, scale: Floats) -> Floats:
    """Near enough for what follows, and sure of what is nothing."""
    found = _solve(work, elapsed, scale)
    fitted = _positive(work @ found)
    miss = np.abs(np.log(fitted / elapsed))
    kept = miss <= np.quantile(miss, 1 - TRIMMED)
    return _solve(work[kept], elapsed[kept], fitted[kept])


def _curve(work: Floats, elapsed: Floats, start: Floats) -> Floats:
    """The coefficients above 0, as shares of their start, by `curve_fit`."""
    some = start > 0
    part = work[:, some] * start[some]
    told = part.sum(axis=1) > 0  # without the others such a step can't be told at all
    part, measured = part[told], np.log(elapsed[told])
    if len(part) <= part.shape[1]:
        return start
    try:
        shares, _ = curve_fit(
            _log_s, part.T, measured, p0=np.ones(part.shape[1]), jac=_slopes,
            bounds=(0.0, np.inf), loss="cauchy", f_scale=USUAL_MISS,
            ftol=TOLERANCE, xtol=TOLERANCE, gtol=TOLERANCE, check_finite=False,
        )  # fmt: skip
    except RuntimeError:  # it found no end; the start is a fit of its own
        return start
    found = start.copy()
    found[some] *= np.where(shares > NOTHING, shares, 0.0)
    return found


def _log_s(parts: Floats, *shares: float) -> Floats:
    return np.asarray(np.log(_positive(np.array(shares) @ parts)), float)


def _slopes(parts: Floats, *shares: float) -> Floats:
    return np.asarray((parts / _positive(np.array(shares) @ parts)).T, float)


def _determine(work: Floats, scale: Floats) -> bool:
    """Whether such steps tell the four coefficients apart."""
    return _varies(work[:, PREFILL]) and float(_own_shares(work / scale[:, None]).min()) > OWN_SHARE


def _varies(column: Floats) -> bool:
    some = column[column > 0]
    return bool(len(some) and some.max() >= SPREAD * some.min())


def _own_shares(columns: Floats) -> Floats:
    """For each column the share of its length that is orthogonal to all others.

    The inverse of the Gram matrix of unit columns has 1 / share² on its diagonal.
    """
    length = np.linalg.norm(columns, axis=0)
    if not length.all():
        return np.zeros(columns.shape[1])
    unit = columns / length
    values, vectors = np.linalg.eigh(unit.T @ unit)
    inverse = (vectors**2 / np.maximum(values, np.finfo(float).eps)).sum(axis=1)
    return np.asarray(inverse**-0.5, float)


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
