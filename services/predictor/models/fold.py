"""Magnus' compression module: a long vector folded to a few values."""

import numpy as np
from numpy.typing import NDArray

INSTRUCTION_VALUES = 4  # d_app and d_user of papers/004 §III-B
USER_INPUT_VALUES = 16


def fold(vectors: NDArray[np.floating], values: int) -> NDArray[np.float32]:
    """Vectors [n, dim] folded to [n, values] (papers/004 §III-B, Fig. 8).

    The columns are cut into `values` neighbouring groups of equal size (sizes differ by at most
    one where `values` does not divide dim); each group becomes its sum over the square root of
    its size. Raises ValueError unless 1 ≤ values ≤ dim. O(n · dim).
    """
    dim = vectors.shape[1]
    if not 1 <= values <= dim:
        raise ValueError(f"cannot fold {dim} values to {values}")
    edges = np.linspace(0, dim, values + 1).astype(np.int64)
    sums = np.add.reduceat(np.asarray(vectors, np.float64), edges[:-1], axis=1)
    return (sums / np.sqrt(np.diff(edges))).astype(np.float32)
