"""SLA classes and the SLA header. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from services.core import Sla

BUDGETS = ("ttft_s", "tpot_s", "mtpot_s")
OTHER = "custom"  # the class of requests with explicit budgets


class SlaError(ValueError):
    """An invalid SLA in a request."""


def resolve(
    classes: Mapping[str, Sla], default: str, name: str, budgets: Mapping[str, float]
) -> Sla:
    """The class of that name; an empty name is the default.

    Explicit budgets replace those of the named class, or of a class without limits, and make the
    result OTHER: a request with other budgets does not count towards the class. Raises SlaError for
    an unknown class, an unknown budget, or a budget that is not a positive number.
    """
    chosen = classes.get(name or default)
    if chosen is None:
        raise SlaError(f"unknown class {name!r}; known: {', '.join(classes)}")
    for key, value in budgets.items():
        if key not in BUDGETS:
            raise SlaError(f"unknown budget {key!r}; known: {', '.join(BUDGETS)}")
        if not (isfinite(value) and value > 0):
            raise SlaError(f"{key} must be a positive number of seconds, not {value:g}")
    if not budgets:
        return chosen
    return replace(chosen if name else Sla(), name=OTHER, **dict[str, Any](budgets))


def find_loosest(classes: Mapping[str, Sla]) -> str:
    """The name of the class with the largest budgets, for work that nothing waits for."""
    return max(classes, key=lambda name: (classes[name].ttft_s, classes[name].tpot_s))


def parse_header(text: str) -> tuple[str, dict[str, float]]:
    """Class name and explicit budgets of `interactive`, `ttft_s=0.5,tpot_s=0.05`, or both."""
    name, budgets = "", {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals and name:
            raise SlaError(f"names two classes, {name!r} and {key!r}")
        if not equals:
            name = key
            continue
        try:
            budgets[key] = float(value)
        except ValueError:
            raise SlaError(f"{key} must be a number of seconds, not {value!r}") from None
    return name, budgets
