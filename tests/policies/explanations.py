"""Lookup of wait explanations by board row."""

import numpy as np

from services.policies.decision import WaitExplanation, WaitExplanations, explain


def explanation(explanations: WaitExplanations, row: int) -> WaitExplanation | None:
    """The explanation of a board row; None for a row that the round did not consider."""
    at = np.flatnonzero(explanations.rows == row)
    if not len(at):
        return None
    i = at[-1]
    values = float(explanations.first_values[i]), float(explanations.second_values[i])
    return explain(int(explanations.reasons[i]), *values)
