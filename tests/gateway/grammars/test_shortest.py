"""The fewest tokens of an answer: worked examples, and bounds of the answers of random walks."""

import json
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.grammars.compiling.compilation import compile_and_measure
from gateway.grammars.shortest import count_least_tokens
from gateway.grammars.token_index import LONGEST_TEXT, TokenIndex
from gateway.readers.constraints import constrain_calls
from gateway.readers.formats import select_formats
from gateway.types.constraint import Constraint, ConstraintKind
from tests.gateway.gateway_fakes import demo_text
from tests.gateway.grammars.test_calls import AUTO, REQUIRED, YES_NO
from tests.gateway.grammars.walks import demo_index, demo_tokenizer, draw_tokens, measure_text

SCHEMA, CHOICE = ConstraintKind.JSON_SCHEMA, ConstraintKind.CHOICE
REGEX, GRAMMAR = ConstraintKind.REGEX, ConstraintKind.GRAMMAR
# Of these, `"ab"` takes `{"` `ab` `"}`, and `null` two tokens.
INDEX = TokenIndex([bytes([letter]) for letter in range(32, 127)] + [b'{"', b"ab", b'"}', b"nul"])


def test_texts_are_covered_and_spelled_by_the_fewest_tokens() -> None:
    assert [INDEX.cover(text) for text in (b'"', b'"ab"', b"abab", b"cab", b"")] == [1, 3, 2, 2, 1]
    assert [INDEX.spell(text) for text in (b'"', b'"ab"', b"abab", b"cab", b"")] == [1, 3, 2, 2, 0]
    wide = TokenIndex([b'x"a', b'b"y', b"ab", b"ca"])
    assert (wide.cover(b'"ab"'), wide.cover(b"ab"), wide.cover(b"cc")) == (2, 1, 1)
    assert INDEX.cover(b"ab" * 10_000) == INDEX.spell(b"ab" * 10_000) == LONGEST_TEXT // 2


TEXTS = st.text("ab", min_size=1, max_size=4)


@given(st.sets(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=4), TEXTS)
def test_cover_is_the_least_of_all_texts(tokens: set[str], text: str) -> None:
    """Against all texts of up to four tokens."""
    counts = [
        last - first + 1
        for size in range(1, 5)
        for chosen in product(sorted(tokens), repeat=size)
        for first, last in _find_places(chosen, text)
    ]
    found = TokenIndex(token.encode() for token in tokens).cover(text.encode())
    assert found == (min(counts) if counts else 1)


def _find_places(tokens: tuple[str, ...], text: str) -> list[tuple[int, int]]:
    """The first and last token of each occurrence of a text."""
    owners = [at for at, token in enumerate(tokens) for _ in token]
    joined = "".join(tokens)
    starts = [at for at in range(len(joined)) if joined.startswith(text, at)]
    return [(owners[at], owners[at + len(text) - 1]) for at in starts]


PAIR = {
    "type": "object",
    "properties": {"ab": {"type": "null"}, "x": {"enum": ["ab", "abab"]}},
    "required": ["ab", "x"],
}
# Kind, source, what every answer begins with, fewest tokens by INDEX, worked by hand.
WORKED = [
    (CHOICE, ["abab", "abc"], b"ab", 2),
    (REGEX, "abab.*", b"abab", 2),
    (REGEX, "[0-9]{9}", b"", 1),
    (GRAMMAR, 'start: "ab" %json {}', b"ab", 1),
    (SCHEMA, True, b"", 1),
    (SCHEMA, {"type": "null"}, b"", 2),
    # "ab" and null and "x" and "ab": 2 + 1 + 2 + 2 beyond the first one
    (SCHEMA, PAIR, b"{", 8),
    (SCHEMA, PAIR | {"required": []}, b"{", 1),
    (SCHEMA, {"type": "array", "items": PAIR, "minItems": 3}, b"[", 22),
    (SCHEMA, {"type": "array", "prefixItems": [PAIR], "items": False, "minItems": 1}, b"[", 8),
    (SCHEMA, {"type": "array", "items": PAIR}, b"[", 1),
    (SCHEMA, {"anyOf": [PAIR, {"const": None}]}, b"", 2),
    (SCHEMA, {"allOf": [PAIR, {"type": "object", "minProperties": 40}]}, b"", 40),
    (SCHEMA, {"$defs": {"p": PAIR}, "$ref": "#/$defs/p"}, b"", 8),
    (SCHEMA, {"$id": "x", "$defs": {"p": PAIR}, "$ref": "#/$defs/p"}, b"", 1),
    (SCHEMA, {"$ref": "#"}, b"", 1),
    (SCHEMA, {"type": "string", "minLength": 100}, b"", 34),  # the longest token has 3 bytes
    (SCHEMA, {"type": "string", "minLength": 100, "format": "date"}, b"", 1),
    (SCHEMA, {"const": 'a"b'}, b"", 2),
    (SCHEMA, PAIR | {"x-guidance": {}}, b"", 1),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "forced", "tokens"), WORKED)
def test_fewest_tokens_match_worked_examples(kind, source, forced, tokens) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    assert count_least_tokens(Constraint(kind, text), forced, INDEX) == tokens


PERSON = {"first_name": {"type": "string"}, "inhabitants": {"type": "integer"}}
LIVE = [
    (CHOICE, json.dumps(["certainly not", "perhaps", "no"]), 1),
    (CHOICE, json.dumps(["certainly not", "perhaps today"]), 3),
    (REGEX, "Result: [a-z]*", 2),
    (REGEX, "[a-z]*", 0),
    (SCHEMA, json.dumps({"type": "object", "properties": PERSON, "required": [*PERSON]}), 9),
    (GRAMMAR, 'root ::= "Result: " [a-z]+', 2),
]


@pytest.mark.parametrize(("kind", "source", "at_least"), LIVE)
def test_no_walk_is_shorter_than_the_fewest_tokens(kind, source: str, at_least: int) -> None:
    grammar, least = measure_text(kind, source)
    assert least >= at_least
    walks = [draw_tokens(grammar, Random(seed), 200, seed / 30) for seed in range(30)]
    found = [len(tokens) for tokens in walks if tokens is not None]
    assert found and least <= min(found)


@pytest.mark.parametrize("use", [AUTO, REQUIRED])
@pytest.mark.parametrize("answer", [None, YES_NO])
def test_calls_have_the_tokens_of_their_shortest(use, answer) -> None:
    formats = select_formats("", "hermes", "none")
    constraint = constrain_calls(formats, use, answer, demo_text().split_specials)
    assert constraint is not None
    grammar, least = compile_and_measure(constraint, demo_tokenizer(), demo_index())
    assert (least > 8) == use.required
    walks = [draw_tokens(grammar, Random(seed), 200, 0.9) for seed in range(10)]
    assert least <= min([len(tokens) for tokens in walks if tokens is not None], default=200)


# Hostile constraints cost little: limits end the walk.
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 10**30, "items": {"type": "string", "minLength": 10**9}},
        {"enum": [f"value-{at}" for at in range(10_000)]},
        {"type": "object", "required": [f"name-{at}" for at in range(10_000)]},
        {"$defs": {str(n): {"allOf": [{"$ref": f"#/$defs/{n + 1}"}] * 9} for n in range(200)},
         "$ref": "#/$defs/0"},
    ],
)  # fmt: skip
def test_fewest_tokens_are_bounded(schema: dict[str, object]) -> None:
    constraint = Constraint(SCHEMA, json.dumps(schema))
    assert 1 <= count_least_tokens(constraint, b"", demo_index()) < 2**31
