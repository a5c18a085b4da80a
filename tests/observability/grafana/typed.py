"""Checks decoded Grafana models against their type annotations, which Grafana's SDK does not do.

The models are generated from Grafana's schema, so this checks names, required parts and types:
encoding a model drops unknown names, and known ones must have the annotated type.
"""

import enum
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

PACKAGE = "grafana_foundation_sdk.models"


def type_errors(value: object, where: str = "$") -> Iterator[str]:
    """The type errors of a decoded model and of all its parts."""
    for name, hint in get_type_hints(type(value)).items():
        part = getattr(value, name)
        here = f"{where}.{name}"
        if not _fits(part, hint):
            yield f"{here}: {part!r} is not {hint}"
        yield from _beneath(part, here)


def _beneath(part: object, here: str) -> Iterator[str]:
    if isinstance(part, list):
        for number, item in enumerate(part):
            yield from _beneath(item, f"{here}[{number}]")
    elif type(part).__module__.startswith(PACKAGE) and not isinstance(part, enum.Enum):
        yield from type_errors(part, here)


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint in (Any, object):
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, arm) for arm in args)
    if origin is Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, args[1]) for v in value.values())
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [member.value for member in hint]
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
