"""Numbers that a policy takes, and the bounds between which they make sense."""

from collections.abc import Mapping
from dataclasses import dataclass

Params = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Param:
    default: float
    least: float
    most: float


def resolve(what: str, known: Mapping[str, Param], given: Params) -> dict[str, float]:
    """All of `known`, defaults filled in.

    Raises ValueError, with the known names or the bounds, for an unknown name or a value out of
    bounds (NaN included).
    """
    for name, value in given.items():
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise ValueError(f"{what} has no parameter {name!r}; known: {listed}")
        param = known[name]
        if not param.least <= value <= param.most:
            bounds = f"[{param.least:g}, {param.most:g}]"
            raise ValueError(f"{what}.{name} must lie in {bounds}, got {value:g}")
    return {name: param.default for name, param in known.items()} | dict(given)
