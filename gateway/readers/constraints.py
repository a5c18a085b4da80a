"""Constraints on answers that must or may call tools. Pure."""

import json
import re
from collections.abc import Callable, Mapping
from typing import cast

from gateway.readers.calls.kinds import CallFormat, WrittenArguments, WrittenChannels
from gateway.readers.calls.parameters import relax
from gateway.readers.formats import AnswerFormats
from gateway.types.constraint import (
    ArgumentsSource,
    CallSource,
    CallsSource,
    ChannelsSource,
    Constraint,
    ConstraintKind,
    FreeText,
    Pieces,
)
from gateway.types.tools import Tool, ToolUse
from services.runtime.errors import InvalidArgument

Spell = Callable[[str], Pieces]  # a text, with special tokens as their ids
BLANKS = r"[\s\x1c-\x1f]*"  # what Python's `str.lstrip` removes
NOT_STRICT = (
    "the parameters of {name}: {fault}, or set strict to false, or force a call by tool_choice"
)


def constrain_calls(
    formats: AnswerFormats, use: ToolUse, answer: Constraint | None, spell: Spell
) -> Constraint | None:
    """The constraint of an answer that may call these tools; None: the answer is free.

    A required call follows its schema. Otherwise the answer follows `answer` or consists of calls;
    without `answer`, it is free text, in which the arguments of strict tools follow their schema.
    Raises InvalidArgument if the model's format cannot express what is to be enforced.
    """
    form = formats.calls_of(use)
    strict = any(tool.strict for tool in use.tools)
    if form is None or not (use.required or strict or answer is not None):
        return answer
    for tool in use.tools:
        enforced = tool.strict or answer is not None
        if enforced and not use.required and (fault := form.find_fault(tool)):
            raise InvalidArgument("tools", NOT_STRICT.format(name=tool.name, fault=fault))
    if use.required:
        return _make(form, use, None, spell)
    return _make(form, use, answer, spell, free=answer is None)


def last_message(formats: AnswerFormats) -> str:
    """What precedes the content in a model's answers; empty if nothing has to."""
    channels = formats.calls.written.channels if formats.calls else None
    return channels.final if channels else ""


def _make(
    form: CallFormat, use: ToolUse, answer: Constraint | None, spell: Spell, free: bool = False
) -> Constraint:
    """With `free`, only the schemas of strict tools are enforced."""
    written, mark = form.written, form.written.trigger
    each_marked = bool(mark) and not written.opening
    before = written.before[len(mark) if each_marked else 0 :]
    opening = written.opening.removeprefix(mark)
    source = CallsSource(
        calls=[_call_source(tool, written.arguments, before, free, spell) for tool in use.tools],
        mark=spell(mark),
        each_marked=each_marked,
        opening=spell(opening),
        end=spell(written.after),
        separator=spell(written.separator),
        closing=spell(written.closing),
        arguments=_spell_arguments(written.arguments, spell) if written.arguments else None,
        parallel=use.parallel and written.channels is None,
        channels=_spell_channels(written.channels, spell) if written.channels else None,
        free=_free_text(form, use, spell) if free else None,
        answer=None
        if answer is None
        else {"kind": answer.kind, "source": answer.source, "whitespace": answer.whitespace},
    )
    text = json.dumps(source, ensure_ascii=False, separators=(",", ":"))
    return Constraint(ConstraintKind.TOOL_CALLS, text, field_name="tools")


def _call_source(
    tool: Tool, arguments: WrittenArguments | None, before: str, free: bool, spell: Spell
) -> CallSource:
    parameters = tool.parameters
    if free and not tool.strict:
        parameters = relax(parameters) if arguments else {}
    schema = cast(Mapping[str, object], {"type": "object", **parameters})
    return CallSource(name=tool.name, begin=spell(before.replace("NAME", tool.name)), schema=schema)


def _spell_arguments(written: WrittenArguments, spell: Spell) -> ArgumentsSource:
    return ArgumentsSource(
        before=spell(written.before),
        after=spell(written.after),
        separator=spell(written.separator),
        not_text=written.not_text,
    )


def _spell_channels(written: WrittenChannels, spell: Spell) -> ChannelsSource:
    return ChannelsSource(
        thoughts=[spell(begin) for begin in written.thoughts],
        end=spell(written.end),
        final=spell(written.final),
    )


def _free_text(form: CallFormat, use: ToolUse, spell: Spell) -> FreeText:
    names = "|".join(re.escape(tool.name) for tool in use.tools)
    return FreeText(
        triggers=[spell(mark) for mark in form.begins if mark not in form.written.unwritten],
        never=form.written.unwritten,
        bare=form.written.bare.replace(" ", BLANKS).replace("NAMES", names),
    )
