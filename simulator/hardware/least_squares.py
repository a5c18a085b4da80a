"""Non-negative least squares, the fit of all coefficients of cost models here."""

import numpy as np
from scipy.optimize import nnls

from services.forecast import Floats


def solve_non_negative(work: Floats, target: Floats) -> Floats:
    """Returns argmin over c >= 0 of |work·c - target|² (Lawson, Hanson, "Solving least squares
    problems", 1974, ch. 23), solved with columns scaled to unit length. O(rows)."""
    length = np.maximum(np.linalg.norm(work, axis=0), np.finfo(float).tiny)
    found, _ = nnls(work / length, target)
    return np.asarray(found / length)
