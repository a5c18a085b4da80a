"""Constraints on answers that must or may call tools. Pure."""

import json
from collections.abc import Callable, Mapping
from typing import cast

from gateway.readers.call_formats import JsonCallFormat, WrittenCalls
from gateway.readers.formats import AnswerFormats
from gateway.types.constraint import CallSource, CallsSource, Constraint, ConstraintKind, Pieces
from gateway.types.tools import Tool, ToolUse

Spell = Callable[[str], Pieces]  # a text, with special tokens as their ids


def constrain_calls(
    formats: AnswerFormats, use: ToolUse, answer: Constraint | None, spell: Spell
) -> Constraint | None:
    """The constraint of an answer that may call these tools; None: the answer is free.

    A required call follows its schema. Otherwise the answer follows `answer` or consists of calls;
    without `answer`, it is free text, in which the arguments of strict tools follow their schema.
    """
    form = formats.calls_of(use)
    written = form.written if isinstance(form, JsonCallFormat) else None
    if use.required or (answer is not None and written):
        assert written is not None
        return _make(use, written, None if use.required else answer, spell)
    if answer is None and written and written.trigger and any(tool.strict for tool in use.tools):
        return _make(use, written, None, spell, written.trigger)
    return answer


def _make(
    use: ToolUse,
    written: WrittenCalls,
    answer: Constraint | None,
    spell: Spell,
    trigger: str = "",
) -> Constraint:
    """With a trigger, only the schemas of strict tools are enforced."""
    each_begins = bool(trigger) and not written.opening
    cut = len(trigger)
    opening = written.opening[0 if each_begins else cut :]
    source = CallsSource(
        calls=[
            _call_source(tool, written.before, cut if each_begins else 0, bool(trigger), spell)
            for tool in use.tools
        ],
        opening=spell(opening),
        end=spell(written.after),
        separator=spell(written.separator),
        closing=spell(written.closing),
        parallel=use.parallel,
        trigger=spell(trigger) if trigger else [],
        each_begins=each_begins,
        answer=None
        if answer is None
        else {"kind": answer.kind, "source": answer.source, "whitespace": answer.whitespace},
    )
    text = json.dumps(source, ensure_ascii=False, separators=(",", ":"))
    return Constraint(ConstraintKind.TOOL_CALLS, text, field_name="tools")


def _call_source(tool: Tool, before: str, cut: int, strict_only: bool, spell: Spell) -> CallSource:
    parameters = tool.parameters if tool.strict or not strict_only else {}
    schema = cast(Mapping[str, object], {"type": "object", **parameters})
    begin = spell(before.replace("NAME", tool.name)[cut:])
    return CallSource(name=tool.name, begin=begin, schema=schema)
