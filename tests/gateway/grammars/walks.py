"""Answers drawn at random under a grammar, token by token, with the demo model's tokenizer."""

from collections.abc import Sequence
from functools import cache
from random import Random

from llguidance import LLMatcher, LLTokenizer

from gateway.grammars.compiling.compilation import (
    compile_and_measure,
    compile_constraint,
    make_index,
)
from gateway.grammars.token_index import TokenIndex
from gateway.types.constraint import CompiledGrammar, Constraint, ConstraintKind
from tests.gateway.gateway_fakes import demo_text

CLOSING_SHARE = 0.5  # of the steps that draw a token which may end a string, list or object
SNIPPET_SHARE = 0.3  # of the steps that begin with a snippet, if there are any
CLOSING = '"]},:'


@cache
def demo_tokenizer() -> LLTokenizer:
    text = demo_text()
    return LLTokenizer(
        text.backend.to_str(), n_vocab=text.vocabulary_tokens, eos_token=sorted(text.eos_ids)
    )


@cache
def _closing_tokens() -> frozenset[int]:
    tokens = range(demo_tokenizer().vocab_size)
    return frozenset(t for t in tokens if demo_text().backend.decode([t]).strip() in set(CLOSING))


def compile_text(kind: ConstraintKind, source: str, whitespace: str | None = None) -> str:
    """The grammar of a constraint; raises GrammarFault."""
    return compile_constraint(Constraint(kind, source, whitespace), demo_tokenizer())


@cache
def demo_index() -> TokenIndex:
    return make_index(demo_tokenizer())


def measure_text(kind: ConstraintKind, source: str) -> CompiledGrammar:
    """The grammar of a constraint with its fewest tokens; raises GrammarFault."""
    return compile_and_measure(Constraint(kind, source), demo_tokenizer(), demo_index())


def allowed_tokens(matcher: LLMatcher) -> list[int]:
    mask = matcher.compute_bitmask()
    assert not matcher.is_error(), matcher.get_error()
    size = demo_tokenizer().vocab_size
    return [token for token in range(size) if mask[token // 8] >> (token % 8) & 1]


def draw_answer(
    grammar: str,
    random: Random,
    max_tokens: int = 400,
    start: str = "",
    snippets: Sequence[str] = (),
) -> str | None:
    """A complete answer; None if it does not end within `max_tokens`. It begins with `start`. Some
    steps continue it by one of the `snippets`, as far as that is allowed."""
    answer = draw_tokens(grammar, random, max_tokens, start=start, snippets=snippets)
    return None if answer is None else demo_tokenizer().decode_bytes(answer).decode()


def draw_tokens(
    grammar: str,
    random: Random,
    max_tokens: int,
    closing_share: float = CLOSING_SHARE,
    start: str = "",
    snippets: Sequence[str] = (),
) -> list[int] | None:
    """The tokens of a complete answer, without the end."""
    matcher = LLMatcher(demo_tokenizer(), grammar, log_level=0)
    answer: list[int] = demo_tokenizer().tokenize_str(start)
    assert matcher.try_consume_tokens(answer) == len(answer)
    eos_ids = demo_text().eos_ids
    for _ in range(max_tokens):
        if snippets and random.random() < SNIPPET_SHARE:
            tokens = demo_tokenizer().tokenize_str(random.choice(snippets))
            answer += tokens[: matcher.try_consume_tokens(tokens)]
            if matcher.is_stopped():
                return answer
        allowed = allowed_tokens(matcher)
        closing = [token for token in allowed if token in _closing_tokens() or token in eos_ids]
        token = random.choice(closing if closing and random.random() < closing_share else allowed)
        if token in eos_ids:
            return answer
        assert matcher.consume_token(token), matcher.get_error()
        answer.append(token)
        if matcher.is_stopped():
            return answer
    return None


def accepts(grammar: str, text: str) -> bool:
    """Whether a text is a complete answer."""
    matcher = LLMatcher(demo_tokenizer(), grammar, log_level=0)
    tokens = demo_tokenizer().tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
