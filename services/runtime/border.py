"""Checks of messages before they reach a core. Pure."""

from collections.abc import Mapping

from google.protobuf.message import Message

from services.runtime.errors import InvalidArgument

MAX_NAME_CHARS = 1_024

Bounds = Mapping[str, tuple[float, float]]  # least and most of each field
COUNT = (0, 2**31 - 1)


def check_name(field: str, name: str, least: int = 1) -> None:
    """Raises InvalidArgument for a name that is too short or too long."""
    if not least <= len(name) <= MAX_NAME_CHARS:
        sentence = f"must have {least} to {MAX_NAME_CHARS} characters, got {len(name)}"
        raise InvalidArgument(field, sentence)


def check_bounds(message: Message, bounds: Bounds) -> None:
    """Raises InvalidArgument for a number out of its bounds, and for NaN. O(fields)."""
    for name, (least, most) in bounds.items():
        value = getattr(message, name)
        if not least <= value <= most:
            raise InvalidArgument(name, f"must be from {least} to {most}, got {value}")
