"""Past-Future's M*, computed directly from its definition."""

import numpy as np

from services.forecast import Floats, Ints


def peak_tokens(held: Ints | Floats, remaining: Ints | Floats) -> float:
    """M* of Past-Future, Eq. 2–4; 0 without requests."""
    if len(held) == 0:
        return 0.0
    order = np.argsort(-remaining)
    count = np.arange(1, len(held) + 1)
    return float(np.max(np.cumsum(held[order]) + count * remaining[order]))
