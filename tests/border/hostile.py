"""Messages with any value in any field, made from the descriptors of the protos."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

MessageT = TypeVar("MessageT", bound=Message)
Values = st.SearchStrategy[Any]

NAN, INFINITE = float("nan"), float("inf")
UNSIGNED = (0, 1, 2, 15, 16, 17, 1_000, 2**20, 2**31 - 1)
SIGNED = (*UNSIGNED, -1, -2, -(2**31))
FLOATS = (0.0, -1.0, 0.5, 1e-300, 1e30, NAN, INFINITE, -INFINITE)
TEXTS = ("", "a", "w", "demo", "unix:/x", "\x00", "é" * 1_025, "x" * 70_000, "²")
VALUES: dict[int, Sequence[Any]] = {
    FieldDescriptor.TYPE_UINT32: (*UNSIGNED, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (*UNSIGNED, 2**40, 2**64 - 1),
    FieldDescriptor.TYPE_INT32: SIGNED,
    FieldDescriptor.TYPE_INT64: (*SIGNED, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_DOUBLE: (*FLOATS, 1e300),
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_BYTES: (b"", b"{}", b"\0" * 7, b"\xff" * 64, b"\xff" * 70_000),
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_ENUM: (0, 1, 3, 77, -1),
}
SIZES = (1, 2, 3, 1_025)  # of repeated fields
DEPTH = 3  # of messages in messages, which a Struct may contain in itself


@cache
def _any_message(name: str, depth: int) -> Values:
    """Messages of a type with some of their fields, each with any value."""
    kind = GetMessageClass(Default().FindMessageTypeByName(name))
    fields = [each for each in kind.DESCRIPTOR.fields if depth < DEPTH or not each.message_type]
    values = {field.name: _any_value(cast(FieldDescriptor, field), depth) for field in fields}
    return st.fixed_dictionaries({}, optional=values).map(lambda given: kind(**given))


def _any_value(field: FieldDescriptor, depth: int) -> Values:
    if _is_map(field):
        assert field.message_type is not None
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_any_single(key, depth), _any_single(value, depth + 1), max_size=2)
    one = _any_single(field, depth)
    return st.lists(one, max_size=2) if field.is_repeated else one


def _any_single(field: FieldDescriptor, depth: int) -> Values:
    if field.message_type is None:
        return st.sampled_from(VALUES[field.type])
    return _any_message(field.message_type.full_name, depth + 1)


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


@st.composite
def spoilt(draw: Callable[[Values], Any], good: MessageT) -> MessageT:
    """A valid message with one to three wrong fields, at any depth: it passes the other checks."""
    message = type(good)()
    message.CopyFrom(good)
    for _ in range(draw(st.integers(1, 3))):
        _spoil(draw, message)
    return message


def _spoil(draw: Callable[[Values], Any], message: Message) -> None:
    """Changes a field, or one of a message that it has."""
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    present = [field for field, _ in message.ListFields()]
    field = draw(st.sampled_from([*present, *fields]))
    within = _messages_of(message, field)
    if within and draw(st.booleans()):
        _spoil(draw, draw(st.sampled_from(within)))
        return
    message.ClearField(field.name)
    if draw(st.integers(0, 4)):  # else it is missing
        message.MergeFrom(type(message)(**{field.name: draw(_wrong_value(field))}))


def _wrong_value(field: FieldDescriptor) -> Values:
    value = _any_value(field, DEPTH - 1)
    if not field.is_repeated or field.message_type is not None:
        return value
    repeated = st.tuples(st.sampled_from(VALUES[field.type]), st.sampled_from(SIZES))
    return value | repeated.map(lambda given: [given[0]] * given[1])


def _messages_of(message: Message, field: FieldDescriptor) -> list[Message]:
    if field.message_type is None or not (field.is_repeated or message.HasField(field.name)):
        return []
    value = getattr(message, field.name)
    if not field.is_repeated:
        return [value]
    if not _is_map(field):
        return list(value)
    held = field.message_type.fields_by_name["value"].message_type
    return list(value.values()) if held is not None else []


def hostile(*good: MessageT) -> st.SearchStrategy[MessageT]:
    """Valid messages, spoilt ones and entirely random ones of one kind."""
    known = st.sampled_from(good)
    return (
        known
        | known.flatmap(spoilt)
        | known.flatmap(spoilt)
        | _any_message(good[0].DESCRIPTOR.full_name, 0)
    )
