"""Fits cost models to the timings of a live server, and measures them on a held-out part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from services.costs import CostModel, StepTiming
from services.estimator.linear import fit as fit_steps
from services.forecast import Floats
from simulator.hardware.least_squares import solve_non_negative
from simulator.hardware.reconstruct import PAUSED_SHARE, DecodePhases, decode_phases, missed_steps
from simulator.hardware.request_log import RequestLog

HELD_OUT_EVERY = 4  # of step timings, every fourth is held out
TRAIN_SHARE = 0.6  # of a log's time; phases that end later are not fitted for the error
MIN_PHASES = 12  # three per coefficient
ROUNDS = 20  # of reconstruction and fit; 6 to 10 suffice
CONVERGED = 1e-4  # relative change of the largest coefficient's contribution
NO_BOUNDS = CostModel(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Calibration:
    """A cost model and the relative errors of its kind on data it was not fitted to.

    `cost` is fitted to all data; `error_p50` and `error_p90` in it are the held-out errors of a
    model fitted to the rest. `fitted` and `held_out` count rows: steps, or decode phases of a log.
    `paused` are requests of the log that the fit leaves out.
    """

    cost: CostModel
    fitted: int
    held_out: int
    rows: str = "steps"
    paused: int = 0


def calibrate(timings: RequestLog | Sequence[StepTiming], bounds: CostModel) -> Calibration:
    """Fits step timings or a request log. `bounds` are the least coefficients for a log; see
    `roofline.derive_bounds`. Raises ValueError with the reason if the data do not suffice."""
    if isinstance(timings, RequestLog):
        return calibrate_log(timings, bounds)
    return calibrate_steps(timings)


def calibrate_steps(timings: Sequence[StepTiming]) -> Calibration:
    """Fits measured steps as the live estimator does: non-negative least squares of the relative
    error, then robustly of its logarithm (`services.estimator.linear`). Every fourth step is held
    out. Raises ValueError if the steps do not determine the coefficients."""
    held_out = timings[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    rest = [t for i, t in enumerate(timings) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    trial, cost = fit_steps(rest), fit_steps(timings)
    if trial is None or cost is None:
        raise ValueError(
            f"{len(timings)} steps do not determine the cost model: give at least 12, with prefill "
            "steps of several sizes and decode steps of several batch sizes and contexts"
        )
    work = np.array([(1, t.prefill_tokens, t.decode_seqs, t.context_tokens) for t in held_out])
    elapsed = np.array([t.elapsed_s for t in held_out])
    return _with_errors(cost, _relative_errors(trial, work, elapsed), len(rest))


def calibrate_log(log: RequestLog, bounds: CostModel = NO_BOUNDS) -> Calibration:
    """Fits the decode phases of a request log: the time from first to last token is the sum of its
    steps' times, which is linear in the coefficients.

    Requests paused for lack of memory are left out (`missed_steps`). Coefficients are found by
    non-negative least squares of the relative error above `bounds`; each fit places the tokens of
    the next one. The held-out phases begin after 60 % of the log's time, and the trial model is
    fitted to those that end before, so that no step is in both. Raises ValueError if either part
    has too few phases, or if prompts come out free.
    """
    missed = missed_steps(log)
    begin_s, end_s = float(log.scheduled_s.min()), float(log.last_token_s.max())
    cut_s = begin_s + TRAIN_SHARE * (end_s - begin_s)
    trial, phases = _fit_log(log, missed, bounds, cut_s)
    cost, _ = _fit_log(log, missed, bounds, np.inf)
    later = phases.select(phases.begin_s >= cut_s)
    if not len(later):
        raise ValueError(
            f"no request of the log begins to decode after {cut_s:.1f} s, 60 % of its time, so the "
            "fit cannot be checked: record a longer log"
        )
    if cost.prefill_token_s <= 0:
        raise ValueError(
            "the log does not determine the time of a prompt token: record one with more or longer "
            "prompts, at a rate that changes"
        )
    fitted = int((phases.end_s <= cut_s).sum())
    errors = _relative_errors(trial, later.work, later.elapsed_s)
    found = _with_errors(cost, errors, fitted)
    return replace(found, rows="decode phases", paused=int((missed > PAUSED_SHARE).sum()))


def _fit_log(
    log: RequestLog, missed: Floats, bounds: CostModel, until_s: float
) -> tuple[CostModel, DecodePhases]:
    """The model of the phases that end by `until_s`, and all phases as it places their tokens."""
    cost: CostModel | None = None
    for _ in range(ROUNDS):
        phases = decode_phases(log, missed, cost)
        fitted = phases.select(phases.end_s <= until_s)
        if len(fitted) < MIN_PHASES:
            raise ValueError(
                f"{len(fitted)} requests with several tokens and no pause are too few to fit; "
                f"{MIN_PHASES} are needed in the first 60 % of the log"
            )
        before, cost = cost, fit_phases(fitted, bounds)
        if before is not None and _moved(before, cost, fitted.work) < CONVERGED:
            break
    assert cost is not None
    return cost, decode_phases(log, missed, cost)


def fit_phases(phases: DecodePhases, bounds: CostModel = NO_BOUNDS) -> CostModel:
    """Returns argmin over c >= bounds of the sum of ((work·c - elapsed) / elapsed)²: non-negative
    least squares of the time above the bounds."""
    least = _coefficients(bounds)
    weighted = phases.work / phases.elapsed_s[:, None]
    above = solve_non_negative(weighted, 1 - weighted @ least)
    base_s, prefill_token_s, decode_seq_s, context_token_s = (float(c) for c in least + above)
    return CostModel(base_s, prefill_token_s, decode_seq_s, context_token_s, samples=len(phases))


def _coefficients(cost: CostModel) -> Floats:
    return np.array([cost.base_s, cost.prefill_token_s, cost.decode_seq_s, cost.context_token_s])


def _moved(before: CostModel, after: CostModel, work: Floats) -> float:
    """The largest change of a coefficient's part of the mean time, relative to that time."""
    mean = work.mean(axis=0)
    parts = np.abs(_coefficients(after) - _coefficients(before)) * mean
    return float(parts.max() / (mean @ _coefficients(after)))


def _relative_errors(cost: CostModel, work: Floats, elapsed_s: Floats) -> Floats:
    return np.asarray(np.abs(work @ _coefficients(cost) - elapsed_s) / elapsed_s)


def _with_errors(cost: CostModel, errors: Floats, fitted: int) -> Calibration:
    p50, p90 = (float(q) for q in np.quantile(errors, [0.5, 0.9]))
    return Calibration(replace(cost, error_p50=p50, error_p90=p90), fitted, len(errors))
