"""Random JSON schemas: every answer drawn under a grammar is valid for an independent validator."""

import json
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gateway.grammars.faults import GrammarFault
from gateway.types.constraint import ConstraintKind
from tests.examples import examples
from tests.gateway.grammars.walks import (
    CLOSING_SHARE,
    accepts,
    compile_text,
    demo_tokenizer,
    draw_answer,
    draw_tokens,
    measure_text,
)

NAMES = st.sampled_from(["a", "b", "key", "é", 'quo"te', "with space", "x/y", "$ref"])
SMALL = st.integers(0, 4)


def _bounds(low: str, high: str, values: st.SearchStrategy[int]) -> st.SearchStrategy[dict]:
    """Either bound, both in order, or none."""
    return st.one_of(
        st.just({}),
        values.map(lambda value: {low: value}),
        values.map(lambda value: {high: value + 1}),
        st.tuples(values, SMALL).map(lambda pair: {low: pair[0], high: sum(pair)}),
    )


def _typed(name: str, *parts: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    return st.tuples(*parts).map(
        lambda found: {"type": name} | {k: v for f in found for k, v in f.items()}
    )


PATTERNS = ["^[a-c]+$", "x", r"^\d{2}-\w$", r"^.\S[^&[]$"]
FORMATS = ["date", "uuid", "ipv4", "time", "date-time"]
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text(max_size=4))
LEAVES = st.one_of(
    st.sampled_from(["null", "boolean"]).map(lambda name: {"type": name}),
    _typed("integer", _bounds("minimum", "maximum", st.integers(-999, 999))),
    _typed("number", _bounds("minimum", "maximum", st.integers(-9, 9))),
    _typed("integer", st.integers(1, 12).map(lambda value: {"multipleOf": value})),
    _typed("string", _bounds("minLength", "maxLength", SMALL)),
    _typed("string", st.sampled_from(PATTERNS).map(lambda pattern: {"pattern": pattern})),
    _typed("string", st.sampled_from(FORMATS).map(lambda name: {"format": name})),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    VALUES.map(lambda value: {"const": value}),
    st.just({}),
)  # fmt: skip


def _object(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    @st.composite
    def build(draw: st.DrawFn) -> dict:
        properties = draw(st.dictionaries(NAMES, inner, max_size=4))
        schema = {"type": "object", "properties": properties}
        if properties:
            schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
        extra = draw(st.one_of(st.just(None), st.booleans(), inner))
        return schema if extra is None else schema | {"additionalProperties": extra}

    return build()


def _nest(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    return st.one_of(
        _object(inner),
        _typed("array", inner.map(lambda s: {"items": s}), _bounds("minItems", "maxItems", SMALL)),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda each: {"type": "array", "prefixItems": each, "items": False}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}),
        st.tuples(_object(inner), _object(inner)).map(lambda pair: {"allOf": [*pair]}),
        inner.map(lambda s: {"$defs": {"s": s}, "$ref": "#/$defs/s"}),
    )


@settings(max_examples=examples(300), deadline=None)
@given(st.recursive(LEAVES, _nest, max_leaves=8), st.integers(0, 2**32))
def test_every_answer_of_a_random_schema_is_valid(schema: dict, seed: int) -> None:
    try:
        grammar, least = measure_text(ConstraintKind.JSON_SCHEMA, json.dumps(_root(schema)))
    except GrammarFault as fault:  # contradictions, and what llguidance does not implement
        assert "cannot be enforced" in str(fault)
        return
    validator = Draft202012Validator(_root(schema))
    for at in range(3):
        closing_share = (CLOSING_SHARE, CLOSING_SHARE, 1.0)[at]  # the last one is short
        tokens = draw_tokens(grammar, Random(seed + at), 150, closing_share)
        if tokens is not None:
            answer = demo_tokenizer().decode_bytes(tokens).decode()
            validator.validate(json.loads(answer))
            assert accepts(grammar, answer)
            assert least <= len(tokens)


def _root(schema: dict) -> dict:
    """References of nested `$defs` resolve from the root: collects them there."""
    found: dict[str, object] = {}

    def move(value: object) -> object:
        if isinstance(value, list):
            return [move(each) for each in value]
        if not isinstance(value, dict):
            return value
        if "$defs" in value and "$ref" in value:
            name = f"s{len(found)}"
            found[name] = {}
            found[name] = move(value["$defs"]["s"])
            return {"$ref": f"#/$defs/{name}"}
        return {key: move(inner) for key, inner in value.items()}

    moved = move(schema)
    assert isinstance(moved, dict)
    return moved | ({"$defs": found} if found else {})


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=8, unique=True))
def test_every_choice_is_an_answer_and_nothing_else(choices: list[str]) -> None:
    grammar = compile_text(ConstraintKind.CHOICE, json.dumps(choices))
    assert all(accepts(grammar, choice) for choice in choices)
    assert draw_answer(grammar, Random(0)) in choices
    assert not any(accepts(grammar, c + "~") for c in choices if c + "~" not in choices)
