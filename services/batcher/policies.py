"""The batching policies there are, by name, and the parameters each takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.batcher.aggressive import aggressive
from services.batcher.conservative import conservative
from services.batcher.group import Policy
from services.batcher.past_future import past_future

POLICIES: dict[str, Policy] = {
    "aggressive": aggressive,
    "conservative": conservative,
    "past_future": past_future,
}


@dataclass(frozen=True, slots=True)
class Param:
    """A number a policy takes: what it is by default, and between which bounds it makes sense."""

    default: float
    least: float
    most: float


PARAMS: dict[str, dict[str, Param]] = {
    "aggressive": {"watermark": Param(0.95, 0.0, 1.0)},  # papers/000 Table 1: 0.90, 0.95, 0.99
    "conservative": {"overcommit": Param(1.0, 0.0, 10.0)},  # Table 1: 1, 1.25, 1.5
    "past_future": {"reserved": Param(0.05, 0.0, 1.0)},  # Table 1: 0.03, 0.05, 0.10
}


def resolve(policy: str, given: Mapping[str, float]) -> dict[str, float]:
    """The policy's parameters, defaults filled in.

    Raises ValueError, with the known names or the bounds, for an unknown policy, an unknown
    parameter, or a value out of bounds (NaN included).
    """
    if policy not in POLICIES:
        raise ValueError(f"no policy is called {policy!r}; known: {', '.join(sorted(POLICIES))}")
    known = PARAMS[policy]
    for name, value in given.items():
        if name not in known:
            listed = ", ".join(sorted(known))
            raise ValueError(f"policy {policy} has no parameter {name!r}; known: {listed}")
        param = known[name]
        if not param.least <= value <= param.most:
            raise ValueError(
                f"{policy}.{name} must lie in [{param.least:g}, {param.most:g}], got {value:g}"
            )
    return {name: param.default for name, param in known.items()} | dict(given)
