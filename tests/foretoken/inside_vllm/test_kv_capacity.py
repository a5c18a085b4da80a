"""How many tokens vLLM's blocks hold."""

import pytest

from foretoken.vllm.kv_capacity import whole_units


@pytest.mark.parametrize(
    ("blocks", "unit", "groups", "units"),
    [
        pytest.param(100, 16, [16], 100, id="one group"),
        pytest.param(100, 16, [16, 16, 16], 33, id="a unit takes a block of each of three groups"),
        pytest.param(100, 32, [32, 16], 33, id="one block of 32 tokens, and two of 16"),
        pytest.param(90, 16, [16, 128], 80, id="eight units share one block of the second group"),
        pytest.param(100, 16, [], 100, id="no KV"),
    ],
)
def test_capacity(blocks: int, unit: int, groups: list[int], units: int) -> None:
    assert whole_units(blocks, unit, groups) == units
