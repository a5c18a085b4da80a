"""Built-in workloads: lengths by name or from a file, and arrival processes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.forecast import Floats
from services.policies.preset import require_known
from simulator.workload.applications import MAGNUS_TASKS, Drawn, LogNormal, draw_tasks
from simulator.workload.trace import read_lengths
from simulator.workload.workload import Workload

Generator = np.random.Generator


@dataclass(frozen=True, slots=True)
class Uniform:
    """Input and output lengths, each uniform between two inclusive bounds."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    def draw(self, count: int, rng: Generator) -> Drawn:
        (input_low, input_high), (output_low, output_high) = self.input_tokens, self.output_tokens
        return Drawn(
            rng.integers(input_low, input_high, count, endpoint=True),
            rng.integers(output_low, output_high, count, endpoint=True),
        )


# Past-Future Scheduler (Gong et al., ASPLOS 2025), Table 1: decode-heavy, balanced, prefill-heavy.
LENGTHS = {
    "d1": Uniform((32, 4_096), (2_048, 4_096)),
    "d2": Uniform((3_000, 5_000), (3_000, 5_000)),
    "d3": Uniform((2_048, 4_096), (32, 4_096)),
}

# SCLS (Cheng et al., 2024) keeps its CodeFuse trace private: Fig. 6 and 14 show that the vast
# majority of answers are below 512 tokens and take less than three slices of 128; §5.1 cuts inputs
# and answers at 1,024. Medians and spreads are assumed: 90 % of answers are below 512 tokens.
CODEFUSE_INPUT = LogNormal(128, 1.1, 1_024)
CODEFUSE_OUTPUT = LogNormal(160, 0.9, 1_024)


def _draw_varying(count: int, rng: Generator) -> Drawn:
    shares = np.array_split(np.arange(count), len(LENGTHS))
    drawn = [
        each.draw(len(share), rng) for each, share in zip(LENGTHS.values(), shares, strict=True)
    ]
    return Drawn(
        np.concatenate([each.input_tokens for each in drawn]),
        np.concatenate([each.output_tokens for each in drawn]),
    )


REQUESTS: dict[str, Callable[[int, Generator], Drawn]] = {
    **{name: lengths.draw for name, lengths in LENGTHS.items()},
    "varying": _draw_varying,  # d1, d2 and d3, one after another: the paper's varying load
    "codefuse": lambda count, rng: Drawn(
        CODEFUSE_INPUT.draw(count, rng), CODEFUSE_OUTPUT.draw(count, rng)
    ),
    "magnus": lambda count, rng: draw_tasks(MAGNUS_TASKS, count, rng),
}
WORKLOADS = tuple(REQUESTS)


def draw_requests(name: str, count: int, rng: Generator) -> Drawn:
    """Draws `count` requests of a workload of WORKLOADS, or lengths with replacement from a file.
    Raises ValueError with the known names."""
    if name in REQUESTS:
        return REQUESTS[name](count, rng)
    path = Path(name)
    if not path.exists():
        require_known("workload", name, (*WORKLOADS, "a CSV file with input_tokens,output_tokens"))
    inputs, outputs = read_lengths(path)
    rows = rng.integers(len(inputs), size=count)
    return Drawn(inputs[rows], outputs[rows])


# Arrival processes: seconds of each of `count` arrivals at a mean rate.


def poisson(count: int, rate: float, rng: Generator) -> Floats:
    return np.cumsum(rng.exponential(1 / rate, count))


def gamma(count: int, rate: float, rng: Generator) -> Floats:
    """Bursty: gaps with a coefficient of variation of 2."""
    shape = 0.25  # 1 / variation²
    return np.cumsum(rng.gamma(shape, 1 / (rate * shape), count))


def even(count: int, rate: float, rng: Generator) -> Floats:
    return np.arange(count) / rate


def burst(count: int, rate: float, rng: Generator) -> Floats:
    """All at once."""
    return np.zeros(count)


ARRIVALS: dict[str, Callable[[int, float, Generator], Floats]] = {
    "poisson": poisson,
    "gamma": gamma,
    "even": even,
    "burst": burst,
}


def build_workload(
    name: str, count: int, arrivals: str, rate: float, clients: int, seed: int
) -> Workload:
    """Builds a built-in workload, or one of lengths from a file, with drawn arrivals or a closed
    loop of `clients`, which has neither arrivals nor a rate. Raises ValueError for unknown names, a
    count or rate that is not positive, and a burst with a rate."""
    if count < 1:
        raise ValueError(f"a workload has at least 1 request, got {count}")
    require_known("arrivals", arrivals, ARRIVALS)
    if not (clients or arrivals == "burst" or rate > 0):
        raise ValueError(
            f"arrivals {arrivals} need a positive rate, got {rate:g}: give a rate, or "
            "arrivals burst"
        )
    if arrivals == "burst" and rate:
        raise ValueError(f"arrivals burst come all at once and have no rate, got {rate:g}")
    rng = np.random.default_rng(seed)
    drawn = draw_requests(name, count, rng)
    arrival_s = burst(count, rate, rng) if clients else ARRIVALS[arrivals](count, rate, rng)
    return Workload(
        Path(name).name.split(".")[0],
        arrival_s,
        drawn.input_tokens,
        drawn.output_tokens,
        drawn.kinds,
        drawn.prompts,
        clients=clients,
    )
