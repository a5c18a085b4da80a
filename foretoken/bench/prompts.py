"""Prompts of a load: from a file, random words of given lengths, or the demo model's tasks."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from foretoken.bench.lengths import Draw

if TYPE_CHECKING:
    from models.chat import Message

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
DEMO_MAX_TOKENS = 1_024
TOKENS_PER_WORD = 1.3  # ordinary English, if the server does not count


@dataclass(frozen=True)
class Prompt:
    """Exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: Sequence[Mapping[str, str]] = ()
    max_tokens: int | None = None

    def with_messages(self) -> "Prompt":
        """Returns the prompt as a chat message."""
        if self.prompt is None:
            return self
        return Prompt(None, [{"role": "user", "content": self.prompt}], self.max_tokens)


Prompts = Callable[[Random], Iterator[Prompt]]  # unbounded; the same for one seed


@dataclass(frozen=True)
class Writer:
    """Encodes requests of one model as JSON."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = False

    def body(self, prompt: Prompt) -> tuple[str, bytes]:
        """Returns the path and the body."""
        path = COMPLETION if prompt.prompt is not None else CHAT
        fields: dict[str, Any] = {
            "model": self.model,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if prompt.prompt is not None:
            fields["prompt"] = prompt.prompt
        else:
            fields["messages"] = list(prompt.messages)
        if prompt.max_tokens is not None:
            fields["max_tokens"] = prompt.max_tokens
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return path, json.dumps(fields).encode()


def from_file(path: Path, max_tokens: int | None, chat: bool) -> Prompts:
    """Returns the lines of a file in seeded order, repeated. Raises ValueError naming the line."""
    read = list(_lines(path, max_tokens, chat))
    if not read:
        raise ValueError(f"{path} contains no prompt")

    def prompts(rng: Random) -> Iterator[Prompt]:
        return cycle(rng.sample(read, len(read)))

    return prompts


def _lines(path: Path, max_tokens: int | None, chat: bool) -> Iterator[Prompt]:
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--prompts: cannot read {path}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = _parse_prompt(json.loads(line), max_tokens)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with `prompt` (text) or `messages` "
                "(each with `role` and `content`), and optionally `max_tokens` (at least 1)"
            ) from None
        if not (chat or prompt.prompt):
            raise ValueError(f"{path}, line {number}: has `messages`; use --endpoint chat")
        yield prompt.with_messages() if chat else prompt


def _parse_prompt(row: dict[str, Any], max_tokens: int | None) -> Prompt:
    limit = row.get("max_tokens", max_tokens)
    text, turns = row.get("prompt"), row.get("messages")
    good = (isinstance(text, str) and turns is None) or (
        text is None and all(turn["role"] and "content" in turn for turn in turns or [{}])
    )
    if not good or not (limit is None or (isinstance(limit, int) and limit >= 1)):
        raise ValueError
    return Prompt(text, turns or (), limit)


@dataclass(frozen=True)
class TokenScale:
    """Converts words to the server's prompt tokens; `measured` if two probes were counted."""

    fixed: float = 0.0
    per_word: float = TOKENS_PER_WORD
    measured: bool = False

    @classmethod
    def from_probes(cls, few: tuple[int, int], many: tuple[int, int]) -> "TokenScale":
        """Fits a line through (words, tokens) of two probes."""
        (words, tokens), (more_words, more_tokens) = few, many
        per_word = (more_tokens - tokens) / (more_words - words)
        if tokens < 1 or per_word <= 0:
            return cls()
        return cls(max(0.0, tokens - per_word * words), per_word, True)

    def words_for(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.per_word))


def random_words(words: int, rng: Random, vocabulary: Sequence[str]) -> str:
    """Returns random words, so that no two prompts share a cached prefix."""
    return " ".join(rng.choices(vocabulary, k=words))


def synthetic(
    inputs: Draw, outputs: Draw, scale: TokenScale, vocabulary: Sequence[str], chat: bool
) -> Prompts:
    """Returns prompts of random words with drawn lengths and `max_tokens`."""

    def prompts(rng: Random) -> Iterator[Prompt]:
        while True:
            text = random_words(scale.words_for(inputs(rng)), rng, vocabulary)
            prompt = Prompt(text, max_tokens=outputs(rng))
            yield prompt.with_messages() if chat else prompt

    return prompts


def demo_tasks(chat: bool, max_tokens: int | None = None) -> Prompts:
    """Returns tasks that the demo model answers correctly, of every length."""
    from models.tasks import stream

    limit = max_tokens or DEMO_MAX_TOKENS

    def prompts(rng: Random) -> Iterator[Prompt]:
        for example in stream(rng, held_out=False):
            if chat and not example.plain:
                yield Prompt(None, [_turn(each) for each in example.messages], limit)
            elif not chat and example.plain:
                yield Prompt(f"{example.user}\n", max_tokens=limit)

    return prompts


def _turn(message: "Message") -> dict[str, str]:
    return {"role": message["role"], "content": message["content"]}
