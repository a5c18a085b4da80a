"""SLA classes, and how a request names one. Pure."""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from services.core import Sla

BUDGETS = ("ttft_s", "tpot_s", "mtpot_s")
OTHER = "custom"  # the class of requests that bring budgets of their own


class SlaError(ValueError):
    """What a client can change about the SLA it asked for."""


def resolve(
    classes: Mapping[str, Sla], default: str, name: str, budgets: Mapping[str, float]
) -> Sla:
    """The class of that name (empty: the default). Explicit budgets, over those of a class that is
    named or of none, make it OTHER: what is judged by other budgets is not counted as the class.

    Raises SlaError for an unknown class, an unknown budget, or one that is no positive number.
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


def parse_header(text: str) -> tuple[str, dict[str, float]]:
    """`interactive`, `ttft_s=0.5,tpot_s=0.05`, or both: the class name, and explicit budgets."""
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
