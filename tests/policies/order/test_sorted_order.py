"""The order by key and serial, for keys of all kinds."""

import numpy as np
import pytest

from services.forecast import Floats
from services.policies.order.ranking import MANY, sorted_order

RNG = np.random.default_rng(7)
COUNT = 2 * MANY
DISTINCT = RNG.permutation(COUNT).astype(float)


def nearly_distinct() -> Floats:
    """Equal keys that no sample of every 64th shows."""
    keys = DISTINCT.copy()
    keys[1:COUNT:97] = keys[2:COUNT:97][: len(keys[1:COUNT:97])]
    return keys


@pytest.mark.parametrize(
    "key",
    [
        DISTINCT,
        nearly_distinct(),
        np.sort(DISTINCT),
        np.floor(DISTINCT / 1_000),
        np.zeros(COUNT),
        np.where(DISTINCT < 5, np.inf, DISTINCT),
        DISTINCT[:10],
        DISTINCT[:0],
    ],
)
def test_order_is_by_key_then_by_serial(key: Floats) -> None:
    serial = RNG.permutation(len(key))
    pairs = sorted(zip(key.tolist(), serial.tolist(), range(len(key)), strict=True))
    assert sorted_order(key, serial).tolist() == [at for _, _, at in pairs]
