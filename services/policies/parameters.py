"""Policy parameters and their bounds."""

from collections.abc import Mapping
from dataclasses import dataclass

Params = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Param:
    """A number, or one of `names`, represented by its index."""

    default: float
    least: float
    most: float
    names: tuple[str, ...] = ()

    def shown(self, value: float) -> str:
        return self.names[int(value)] if self.names else f"{value:g}"


def named(*names: str) -> Param:
    """A choice among names; the first is the default."""
    return Param(0, 0, len(names) - 1, names)


def resolve(what: str, known: Mapping[str, Param], given: Params) -> dict[str, float]:
    """All of `known`, with defaults filled in.

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
