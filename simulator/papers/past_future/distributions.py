"""The three length distributions of the Past-Future paper's evaluation (§5.1)."""

from dataclasses import dataclass

import numpy as np

from simulator.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Distribution:
    """Uniform lengths in tokens, (shortest, longest), both inclusive."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


DISTRIBUTIONS = {
    "D1": Distribution((32, 4_096), (2_048, 4_096)),
    "D2": Distribution((3_000, 5_000), (3_000, 5_000)),
    "D3": Distribution((2_048, 4_096), (32, 4_096)),
}


def draw_burst(name: str, count: int, seed: int) -> Workload:
    """`count` requests of a distribution, all queued at the start."""
    lengths = DISTRIBUTIONS[name]
    rng = np.random.default_rng([seed, 1 + list(DISTRIBUTIONS).index(name)])
    inputs = rng.integers(*lengths.input_tokens, count, endpoint=True)
    outputs = rng.integers(*lengths.output_tokens, count, endpoint=True)
    return Workload(name, np.zeros(count), inputs, outputs)
