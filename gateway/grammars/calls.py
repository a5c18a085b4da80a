"""Lark grammars of tool calls, and of what follows free text. Pure."""

import json
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy

from gateway.grammars.arguments import Embed, write_arguments
from gateway.grammars.lark import TEXT, read_grammars, write_pieces, write_regex
from gateway.grammars.places import walk_schema
from gateway.types.constraint import (
    CallSource,
    CallsSource,
    ChannelsSource,
    ConstraintKind,
    Pieces,
)

ANSWER, BEHIND = "answer", "behind"  # names of grammars within others
MAX_BLANKS = 4  # between the end of free text and the answer


def write_calls(source: CallsSource, embed: Embed) -> str:
    """The grammar of an answer with calls; with `source["answer"]` it refers to the grammar
    ANSWER."""
    numbers = range(len(source["calls"]))
    rules = [f"TEXT: {TEXT}"]
    between = [*source["separator"], *(source["mark"] if source["each_marked"] else ())]
    end, closing = write_pieces(source["end"]), write_pieces(source["closing"])
    for n in numbers:
        call = source["calls"][n]
        rules += write_arguments(f"arguments_{n}", call["schema"], source["arguments"], embed)
        rules.append(f"first_{n}: {_write_first(source, n, embed)}")
        rules.append(f"call_{n}: {write_pieces(call['begin'])} arguments_{n} {end}")
    for name in ("first", "call"):
        rules.append(f"{name}: {' | '.join(f'{name}_{n}' for n in numbers)}")
    more = f"({write_pieces(between)} call)*" if source["parallel"] else ""
    rules.append(f"calls: first {more} {closing}")
    begun = "call" if source["each_marked"] else f"call {more} {closing}"
    rules.append(f"begun: {write_pieces(source['opening'])} {begun}")
    rules += _write_start(source)
    return "\n".join(rules)


def may_be_json(source: CallsSource) -> bool:
    """Whether the answer may be JSON, or a call that does not begin with a mark."""
    answer = source["answer"]
    return (
        answer is not None and answer["kind"] == ConstraintKind.JSON_SCHEMA and not source["mark"]
    )


def _write_first(source: CallsSource, n: int, embed: Embed) -> str:
    """The first call, of the `n`-th tool. A lexer that has begun a text cannot go back to a shorter
    one: the beginning of the call is one text, but not where JSON may come in its place."""
    call, head = source["calls"][n], [*source["mark"], *source["opening"]]
    rest = f"arguments_{n} {write_pieces(source['end'])}"
    if not may_be_json(source):
        return f"{write_pieces([*head, *call['begin']])} {rest}"
    apart = f"{write_pieces(head)} {write_pieces(call['begin'])} {rest}"
    return _write_object(call, source["end"], embed) or apart


def _write_object(call: CallSource, end: Pieces, embed: Embed) -> str:
    """A call that is a JSON object; empty for another one."""
    begin, after = ("".join(map(str, each)) for each in (call["begin"], end))
    try:
        members = list(json.loads(f"{begin}{{}}{after}").items())
    except (ValueError, AttributeError):
        return ""
    schema = deepcopy(dict(call["schema"]))
    found = [inner for _, inner in walk_schema(schema)]
    if any("$id" in inner for inner in found):  # its references mean places of their own
        return ""
    *others, (key, _) = members
    for inner in found:
        if isinstance(ref := inner.get("$ref"), str) and (ref == "#" or ref.startswith("#/")):
            inner["$ref"] = f"#/properties/{key}{ref[1:]}"
    whole = {
        "type": "object",
        "properties": {**{name: {"const": value} for name, value in others}, key: schema},
        "required": [name for name, _ in members],
        "additionalProperties": False,
    }
    return f"%json {json.dumps(embed(whole))}"


def _write_start(source: CallsSource) -> Iterator[str]:
    free, channels = source["free"], source["channels"]
    if channels is not None:
        yield from _write_channels(source, channels)
        return
    if free is None:
        yield f"start: calls | @{ANSWER}" if source["answer"] else "start: calls"
        return
    never = "".join(f" & ~{write_regex(f'(?s:.*{re.escape(text)}.*)')}" for text in free["never"])
    yield f"FREE: {TEXT}{never}"
    yield from _write_items("item", "free", "FREE", free["triggers"])
    yield "rest: FREE"
    rest = "item* rest" if source["parallel"] else "rest"
    if not free["bare"]:
        yield f"start: {rest if source['parallel'] else 'item | rest'}"
        return
    yield f"OTHER: FREE & ~/(?s:{free['bare']}.*)/"
    yield "other: OTHER"
    if not free["triggers"]:
        yield "start: calls | other"
        return
    yield from _write_items("first_item", "first_free", "OTHER", free["triggers"])
    more = rest if source["parallel"] else ""
    yield f"start: calls | other | first_item {more}"


def _write_channels(source: CallsSource, channels: ChannelsSource) -> Iterator[str]:
    yield write_free("thought", channels["end"])
    begins = " | ".join(map(write_pieces, channels["thoughts"]))
    yield f"thoughts: (({begins}) thought)*"
    answer = f"@{ANSWER}" if source["answer"] else "TEXT"
    yield f"final: {write_pieces(channels['final'])} {answer}"
    required = source["answer"] is None and source["free"] is None
    yield f"start: thoughts {'calls' if required else '(calls | final)'}"


def _write_items(item: str, free: str, text: str, triggers: Sequence[Pieces]) -> Iterator[str]:
    """The rule `item`: free text up to a trigger, and the calls that it begins."""
    for at, trigger in enumerate(triggers):
        yield write_free(f"{free}_{at}", trigger, text)
    yield f"{item}: ({' | '.join(f'{free}_{at}' for at in range(len(triggers)))}) begun"


def write_free(name: str, end: Pieces, text: str = "TEXT") -> str:
    """A rule of free text up to `end`, its first occurrence, and with it."""
    if isinstance(end[0], int):
        return f"{name}: {text} {write_pieces(end)}"
    first, others = write_pieces(end[:1]), write_pieces(end[1:])
    return f"{name}_end[lazy]: {text} {first}\n{name}: {name}_end {others}"


def put_after(end: Pieces, grammar: str) -> str:
    """The grammar behind free text up to `end`."""
    outer = [
        write_free("free", end),
        f"TEXT: {TEXT}",
        f"BLANKS: /[ \\n]{{0,{MAX_BLANKS}}}/",
        f"start: free BLANKS @{BEHIND}",
    ]
    return join_grammars("\n".join(outer), grammar, BEHIND)


def join_grammars(lark: str, inner: str, name: str) -> str:
    """A grammar in Lark and a serialized one, to which it refers by this name."""
    first, *others = read_grammars(inner)
    outer = {"name": "outer", "lark_grammar": lark}
    grammars = [outer, {**first, "name": name}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)
