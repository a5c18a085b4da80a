"""Turns constraints into grammars of llguidance, or into a sentence that says what to change.

Runs only in a process that may be killed: `gateway.grammars.process`.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag

from gateway.grammars.arguments import ArgumentFault, write_arguments
from gateway.grammars.calls import ANSWER, join_grammars, put_after, write_calls
from gateway.grammars.ebnf import ebnf_to_lark, is_ebnf
from gateway.grammars.lark import quote
from gateway.grammars.places import find_place, walk_schema
from gateway.types.constraint import ArgumentsSource, CallsSource, Constraint, ConstraintKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stub only

# Where JSON allows whitespace, a model may write so much of it: nine levels of indentation. Without
# a bound, a model that does not know what to write next fills its answer with whitespace.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
# What a client's own `x-guidance` cannot switch on: both would weaken a schema silently.
STRICT: "JsonCompileOptions" = {"lenient": False, "coerce_one_of": False}
SILENT = 0  # log level
BRIEF = LLParserLimits(verbose_errors=False)
# Sentences for what llguidance only names.
STOPS = {
    "NoExtensionBias": "no answer can follow it",
    "ParserTooComplex": "is too complex; make it simpler",
    "LexerTooComplex": "has a regular expression that is too complex; make it simpler",
}
MAX_FAULT_CHARS = 500


class GrammarFault(Exception):
    """The constraint cannot be enforced; the message says why."""


def compile_constraint(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    """The grammar, serialized by llguidance, which a matcher of this tokenizer accepts. Raises
    GrammarFault."""
    try:
        grammar = _SERIALIZERS[constraint.kind](constraint)
        if constraint.after:
            grammar = put_after(constraint.after, grammar)
    except (GrammarFault, MemoryError, RecursionError):
        raise
    except Exception as error:  # of llguidance and its converters, which share no base class
        _explain_calls(constraint, tokenizer)
        raise GrammarFault(_shorten(str(error))) from error
    matcher = LLMatcher(tokenizer, grammar, log_level=SILENT, limits=BRIEF)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        _explain_calls(constraint, tokenizer)
        raise GrammarFault(_explain(constraint, matcher.get_error()))
    return grammar


def _serialize_schema(constraint: Constraint) -> str:
    try:
        schema = json.loads(constraint.source)
    except ValueError as error:
        raise GrammarFault(f"is not valid JSON: {error}") from None
    return _schema_grammar(schema, constraint.whitespace)


def _schema_grammar(schema: object, whitespace: str | None) -> str:
    """`true` and `false` are schemas, too."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarFault("a JSON schema must be an object")
    _drop_defaults(schema)
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema, ensure_ascii=False),
        defaults=_whitespace_options(whitespace),
        overrides=STRICT,
    )


def _drop_defaults(schema: object) -> None:
    """Removes from a schema what has no effect, but is refused by llguidance."""
    for _, inner in walk_schema(schema):
        if inner.get("uniqueItems") is False:
            del inner["uniqueItems"]


def _whitespace_options(whitespace: str | None) -> "JsonCompileOptions":
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}


def _embed(schema: object, whitespace: str | None) -> dict[str, object]:
    """The schema as Lark grammars embed it, with its options. Raises GrammarFault."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarFault("a JSON schema must be an object")
    _drop_defaults(schema)
    return {**schema, "x-guidance": {**_whitespace_options(whitespace), **STRICT}}


def _serialize_grammar(constraint: Constraint) -> str:
    source = constraint.source
    return LLMatcher.grammar_from_lark(ebnf_to_lark(source) if is_ebnf(source) else source)


def _serialize_choice(constraint: Constraint) -> str:
    choices = json.loads(constraint.source)
    alternatives = " | ".join(map(quote, choices))
    return LLMatcher.grammar_from_lark(f"start: {alternatives}")


def _serialize_tags(constraint: Constraint) -> str:
    given = json.loads(constraint.source)
    tags = [_read_tag(tag, given["triggers"], constraint) for tag in given["structures"]]
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


def _read_tag(tag: Mapping[str, object], triggers: list[str], constraint: Constraint) -> StructTag:
    begin = str(tag["begin"])
    trigger = next((each for each in triggers if begin.startswith(each)), None)
    if not trigger:
        raise GrammarFault(f"begin {begin[:80]!r} starts with none of the triggers")
    schema = tag.get("schema")
    if not isinstance(schema, dict | None):
        raise GrammarFault("the schema of a structure must be an object")
    grammar = _embed(schema or {}, constraint.whitespace)
    return StructTag(trigger=trigger, begin=begin, grammar=grammar, end=str(tag["end"]))


def _serialize_calls(constraint: Constraint) -> str:
    source: CallsSource = json.loads(constraint.source)
    answer = source["answer"]
    lark = write_calls(source, lambda schema: _embed(schema, constraint.whitespace))
    if answer is None:
        return LLMatcher.grammar_from_lark(lark)
    kind = ConstraintKind(answer["kind"])
    inner = _SERIALIZERS[kind](Constraint(kind, answer["source"], answer["whitespace"]))
    return join_grammars(lark, inner, ANSWER)


def _explain_calls(constraint: Constraint, tokenizer: LLTokenizer) -> None:
    """Raises a GrammarFault that names the tool, if the parameters of one cannot be enforced."""
    if constraint.kind is not ConstraintKind.TOOL_CALLS:
        return
    source: CallsSource = json.loads(constraint.source)
    for call in source["calls"]:
        try:
            if source["arguments"]:
                _write_alone(call["schema"], source["arguments"])
            schema = json.dumps(call["schema"])
            compile_constraint(Constraint(ConstraintKind.JSON_SCHEMA, schema), tokenizer)
        except (ArgumentFault, GrammarFault) as fault:
            raise GrammarFault(f"the parameters of {call['name']}: {fault}") from None


def _write_alone(schema: Mapping[str, object], arguments: ArgumentsSource) -> None:
    """Raises ArgumentFault if the arguments cannot be written."""
    for _ in write_arguments("arguments", schema, arguments, lambda _: {}):
        pass


_SERIALIZERS: Mapping[ConstraintKind, Callable[[Constraint], str]] = {
    ConstraintKind.JSON_SCHEMA: _serialize_schema,
    ConstraintKind.REGEX: lambda constraint: LLMatcher.grammar_from_regex(constraint.source),
    ConstraintKind.CHOICE: _serialize_choice,
    ConstraintKind.GRAMMAR: _serialize_grammar,
    ConstraintKind.STRUCTURAL_TAG: _serialize_tags,
    ConstraintKind.TOOL_CALLS: _serialize_calls,
}


def _explain(constraint: Constraint, error: str) -> str:
    """llguidance's sentence, with the place in the schema that it speaks of if it names none."""
    sentence = next((STOPS[name] for name in STOPS if error.startswith(name)), None)
    sentence = sentence or f"cannot be enforced: {_shorten(error)}"
    if constraint.kind is not ConstraintKind.JSON_SCHEMA:
        return sentence
    place = find_place(json.loads(constraint.source), error)
    return f"{sentence} (at {place})" if place else sentence


def _shorten(text: str) -> str:
    return " ".join(text.split())[:MAX_FAULT_CHARS]
