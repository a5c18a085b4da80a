"""Turns constraints into grammars of llguidance, or into a sentence that says what to change.

Runs only in a process that may be killed: `gateway.grammars.compiling.process`.
"""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from gateway.grammars.arguments import ArgumentFault, write_arguments
from gateway.grammars.calls import ANSWER, join_grammars, put_after, write_calls
from gateway.grammars.ebnf import ebnf_to_lark, is_ebnf
from gateway.grammars.faults import GrammarFault
from gateway.grammars.lark import Grammars, quote, read_grammars
from gateway.grammars.places import find_place
from gateway.grammars.schemas import PLAIN_ESCAPES, allows_other_names, write_exactly
from gateway.grammars.shortest import count_least_tokens
from gateway.grammars.tags.formats import read_format
from gateway.grammars.tags.parts import Grammar, Regex, Schema
from gateway.grammars.tags.reading import FormatReader
from gateway.grammars.tags.writing import TagWriter
from gateway.grammars.token_index import TokenIndex
from gateway.types.constraint import (
    ArgumentsSource,
    CallsSource,
    CompiledGrammar,
    Constraint,
    ConstraintKind,
)

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stub only

# Where JSON allows whitespace, a model may write so much of it: nine levels of indentation. Without
# a bound, a model that does not know what to write next fills its answer with whitespace.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
SILENT = 0  # log level
BRIEF = LLParserLimits(verbose_errors=False)
# Sentences for what llguidance only names.
STOPS = {
    "NoExtensionBias": "no answer can follow it",
    "ParserTooComplex": "is too complex; make it simpler",
    "LexerTooComplex": "has a regular expression that is too complex; make it simpler",
}
MAX_FAULT_CHARS = 500


def compile_constraint(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    """The grammar, serialized by llguidance, which a matcher of this tokenizer accepts. Raises
    GrammarFault."""
    return _compile(constraint, tokenizer)[0]


def compile_and_measure(
    constraint: Constraint, tokenizer: LLTokenizer, index: TokenIndex
) -> CompiledGrammar:
    """The grammar with the fewest tokens of an answer. `index` is of the same tokenizer. Raises
    GrammarFault."""
    text, matcher = _compile(constraint, tokenizer)
    if matcher.is_accepting():
        return CompiledGrammar(text)
    return CompiledGrammar(text, count_least_tokens(constraint, matcher.compute_ff_bytes(), index))


def make_index(tokenizer: LLTokenizer) -> TokenIndex:
    """The bytes of each token of a tokenizer."""
    return TokenIndex(tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size))


def _compile(constraint: Constraint, tokenizer: LLTokenizer) -> tuple[str, LLMatcher]:
    try:
        grammar = _SERIALIZERS[constraint.kind](constraint, tokenizer)
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
    return grammar, matcher


def _serialize_schema(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    try:
        schema = json.loads(constraint.source)
    except ValueError as error:
        raise GrammarFault(f"is not valid JSON: {error}") from None
    schema = _require_schema(schema)
    write_exactly(schema)
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema, ensure_ascii=False),
        defaults=_whitespace_options(constraint.whitespace),
        overrides=_strict_options(schema),
    )


def _require_schema(schema: object) -> dict[str, object]:
    """`true` and `false` are schemas, too."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarFault("a JSON schema must be an object")
    return schema


def _whitespace_options(whitespace: str | None) -> "JsonCompileOptions":
    if whitespace == "":
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": WHITESPACE if whitespace is None else whitespace}


def _strict_options(schema: dict[str, object]) -> "JsonCompileOptions":
    """What a client's own `x-guidance` cannot change: it would weaken the schema silently."""
    escapes = PLAIN_ESCAPES if allows_other_names(schema) else None
    return {"lenient": False, "coerce_one_of": False, "json_allowed_escapes": escapes}


def _embed(schema: object, whitespace: str | None) -> dict[str, object]:
    """The schema as Lark grammars embed it, with its options. Raises GrammarFault."""
    exact = deepcopy(_require_schema(schema))
    write_exactly(exact)
    return {**exact, "x-guidance": {**_whitespace_options(whitespace), **_strict_options(exact)}}


def _serialize_regex(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    return LLMatcher.grammar_from_regex(constraint.source)


def _serialize_grammar(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    source = constraint.source
    return LLMatcher.grammar_from_lark(ebnf_to_lark(source) if is_ebnf(source) else source)


def _serialize_choice(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    choices = json.loads(constraint.source)
    alternatives = " | ".join(map(quote, choices))
    return LLMatcher.grammar_from_lark(f"start: {alternatives}")


def _serialize_tags(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    reader = FormatReader(partial(_find_special, tokenizer))

    def embed(given: Schema) -> Mapping[str, object]:
        whitespace = constraint.whitespace if given.whitespace is None else given.whitespace
        return _embed(given.schema, whitespace)

    def serialize(given: Regex | Grammar) -> Grammars:
        kind = ConstraintKind.REGEX if isinstance(given, Regex) else ConstraintKind.GRAMMAR
        inner = Constraint(kind, given.source)
        return read_grammars(_SERIALIZERS[kind](inner, tokenizer))

    writer = TagWriter(embed, serialize)
    lark = writer.write(reader.read(read_format(constraint.source)))
    return json.dumps({"grammars": [{"lark_grammar": lark}, *writer.inner]}, ensure_ascii=False)


def _find_special(tokenizer: LLTokenizer, token: str | int) -> int:
    """The id of a special token, by its text or id."""
    if isinstance(token, int):
        ids = [token] if 0 <= token < tokenizer.vocab_size else []
    else:
        ids = tokenizer.tokenize_str(token, parse_special=True)
    if len(ids) != 1 or not tokenizer.is_special_token(ids[0]):
        raise GrammarFault(f"{str(token)[:80]!r} is not a special token of this model")
    return ids[0]


def _serialize_calls(constraint: Constraint, tokenizer: LLTokenizer) -> str:
    source: CallsSource = json.loads(constraint.source)
    answer = source["answer"]
    lark = write_calls(source, lambda schema: _embed(schema, constraint.whitespace))
    if answer is None:
        return LLMatcher.grammar_from_lark(lark)
    kind = ConstraintKind(answer["kind"])
    inner = Constraint(kind, answer["source"], answer["whitespace"])
    return join_grammars(lark, _SERIALIZERS[kind](inner, tokenizer), ANSWER)


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


_SERIALIZERS: Mapping[ConstraintKind, Callable[[Constraint, LLTokenizer], str]] = {
    ConstraintKind.JSON_SCHEMA: _serialize_schema,
    ConstraintKind.REGEX: _serialize_regex,
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
