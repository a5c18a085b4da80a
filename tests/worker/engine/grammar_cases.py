"""Grammars, prompts and an oracle for answers of the demo model that follow a grammar."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from tokenizers import Tokenizer

from foretoken.running.options import demo_model
from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.folder import read_eos_ids
from services.worker.requests.types.prompt import SamplingParams
from tests.system.mixed_load import load_text

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

COMPACT: "JsonCompileOptions" = {"whitespace_flexible": False}
WORDS = ("alpha", "beta", "on", "one", "", 'say "hi"', "ünï")


def json_grammar(schema: Any) -> str:
    """A grammar of JSON without optional spaces, so that answers end early."""
    return LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)


def regex_grammar(regex: str) -> str:
    return LLMatcher.grammar_from_regex(regex)


def asked(text: str) -> tuple[int, ...]:
    return tuple(load_text().encode_chat([{"role": "user", "content": text}]))


def load(**settings: Any) -> Engine:
    defaults = {"device": "cpu", "dtype": "float32", "kv_tokens": 8192, "host_gib": 0}
    return Engine.load(EngineConfig(model=demo_model(), **{**defaults, **settings}))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{demo_model()}/tokenizer.json")


@cache
def eos_ids() -> frozenset[int]:
    return read_eos_ids(demo_model())


def text_of(tokens: Sequence[int]) -> str:
    return str(tokenizer().decode(list(tokens), skip_special_tokens=True))


def ids_of(characters: str) -> tuple[int, ...]:
    """The token of each character."""
    return tuple(tokenizer().encode(character).ids[0] for character in characters)


@cache
def _grammar_tokenizer() -> LLTokenizer:
    return LLTokenizer(tokenizer().to_str(), eos_token=sorted(eos_ids()))


def follows(grammar: str, tokens: Sequence[int]) -> bool:
    """Whether each of these tokens is one that a matcher of its own allows there."""
    matcher = LLMatcher(_grammar_tokenizer(), grammar)
    for token in tokens:
        words = np.zeros((1, -(-_grammar_tokenizer().vocab_size // 32)), np.int32)
        fill_next_token_bitmask(matcher, words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        if not bits[token] or not matcher.consume_token(token):
            return False
    return not matcher.is_error()


def is_complete(grammar: str, tokens: Sequence[int]) -> bool:
    """Whether these tokens follow the grammar to an end of sequence."""
    return tokens[-1] in eos_ids() and follows(grammar, tokens)


# Schemas of JSON values with a bounded length

_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(0, 4).map(lambda most: {"type": "string", "maxLength": most}),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}-[0-9]{2}$"}),
    st.tuples(st.integers(-50, 50), st.integers(0, 900)).map(
        lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]}
    ),
    st.lists(st.sampled_from([*WORDS, 1, -7, None, True]), min_size=1, max_size=4, unique=True).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(WORDS).map(lambda word: {"const": word}),
)


def _arrays(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(items, st.integers(0, 2), st.integers(0, 1)).map(
        lambda given: {
            "type": "array",
            "items": given[0],
            "minItems": given[1],
            "maxItems": given[1] + given[2],
        }
    )


def _objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "name", "total count", "ключ", "x_1"])
    return st.tuples(
        st.dictionaries(names, values, max_size=3), st.randoms(use_true_random=False)
    ).map(
        lambda given: {
            "type": "object",
            "properties": given[0],
            "required": [name for name in given[0] if given[1].random() < 0.7],
            "additionalProperties": False,
        }
    )


SCHEMAS = st.recursive(
    _LEAVES, lambda inner: st.one_of(_arrays(inner), _objects(inner)), max_leaves=4
)

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    seed=st.integers(0, 2**31),
    top_k=st.sampled_from([0, 0, 8]),
    top_p=st.sampled_from([1.0, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.2]),
    logprobs=st.sampled_from([None, None, 2]),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 0, 12]),
)
