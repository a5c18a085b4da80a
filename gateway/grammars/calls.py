"""Lark grammars of tool calls, and of what follows free text. Pure."""

import json
from collections.abc import Mapping, Sequence

from gateway.grammars.lark import read_grammars, write_mark
from gateway.types.constraint import CallsSource, Pieces

TEXT = "TEXT: /(.|\\n)*/"
ANSWER, BEHIND = "answer", "behind"  # names of grammars within others
MAX_BLANKS = 4  # between the end of free text and the answer


def write_calls(source: CallsSource, schemas: Sequence[Mapping[str, object]]) -> str:
    """The grammar of an answer with calls; with `source["answer"]` it refers to the grammar
    ANSWER. `schemas` are those of the calls."""
    numbers = range(len(source["calls"]))
    rules = [
        f"call_{n}: {_write(source['calls'][n]['begin'])} %json {json.dumps(schemas[n])} "
        f"{_write(source['end'])}"
        for n in numbers
    ]
    rules.append(f"call: {' | '.join(f'call_{n}' for n in numbers)}")
    more = f"({_write(source['separator'])} call)*" if source["parallel"] else ""
    rules.append(f"calls: {_write(source['opening'])} call {more} {_write(source['closing'])}")
    rules.append(_write_start(source))
    return "\n".join(rules)


def _write_start(source: CallsSource) -> str:
    if not source["trigger"]:
        return f"start: calls | @{ANSWER}" if source["answer"] else "start: calls"
    begun = "call" if source["each_begins"] else "calls"
    item = f"{write_free('free', source['trigger'])}\nitem: free {begun}\nrest: TEXT\n{TEXT}"
    return f"{item}\nstart: {'item* rest' if source['parallel'] else 'item | rest'}"


def write_free(name: str, end: Pieces) -> str:
    """A rule of free text up to `end`, its first occurrence, and with it."""
    lazy = "" if isinstance(end[0], int) else "[lazy]"
    if lazy:
        return f"{name}_end[lazy]: TEXT {_write(end[:1])}\n{name}: {name}_end {_write(end[1:])}"
    return f"{name}: TEXT {_write(end)}"


def put_after(end: Pieces, grammar: str) -> str:
    """The grammar behind free text up to `end`."""
    outer = [
        write_free("free", end),
        TEXT,
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


def _write(pieces: Pieces) -> str:
    return " ".join(write_mark(piece) for piece in pieces if piece != "")
