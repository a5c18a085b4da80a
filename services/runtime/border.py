"""Checks of messages before they reach a core. Pure."""

from collections.abc import Iterable, Mapping

from google.protobuf.message import Message

from protos.generated import common_pb2
from services.costs import MAX_S, is_possible_s
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


def check_times(
    field: str, samples: Iterable[common_pb2.StepTiming | common_pb2.SwapTiming]
) -> None:
    """Raises InvalidArgument for a time that cannot be true. O(samples)."""
    for sample in samples:
        if not is_possible_s(sample.elapsed_s):
            sentence = f"must be from 0 to {MAX_S:g} s, got {sample.elapsed_s:g}"
            raise InvalidArgument(f"{field}.elapsed_s", sentence)


class Ascending:
    """Checks that the numbers of a stream's messages ascend, from 1 at least."""

    def __init__(self, field: str):
        self._field, self._last = field, 0

    def check(self, number: int) -> None:
        """Raises InvalidArgument unless the number is above all before."""
        if number <= self._last:
            sentence = f"must be above {self._last}, as numbers of a stream ascend, got {number}"
            raise InvalidArgument(self._field, sentence)
        self._last = number
