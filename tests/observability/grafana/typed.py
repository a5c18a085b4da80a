"""Is a value what its model's annotations say? Grafana's SDK decodes without looking.

Its models are generated from the schema that Grafana publishes, so this is that schema's check of
names, required parts and types: whatever a model does not know is lost on the way back, and
whatever it knows must have the annotated type.
"""

import enum
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

PACKAGE = "grafana_foundation_sdk.models"


def flaws(value: object, where: str = "$") -> Iterator[str]:
    """What is wrong in a decoded model and everything beneath it; nothing where all is right."""
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
        yield from flaws(part, here)


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
