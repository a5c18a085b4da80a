"""What is asked: a file's prompts, random words of given lengths, or the demo model's own tasks."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from foretoken.bench.lengths import Draw

if TYPE_CHECKING:
    from models.tasks import Message

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
DEMO_MAX_TOKENS = 1_024
TOKENS_A_WORD = 1.3  # of ordinary English, where a server doesn't say


@dataclass(frozen=True)
class Prompt:
    """One request's own part: exactly one of `prompt` and `messages`."""

    prompt: str | None = None
    messages: Sequence[Mapping[str, str]] = ()
    max_tokens: int | None = None

    def with_messages(self) -> "Prompt":
        """The same for a chat."""
        if self.prompt is None:
            return self
        return Prompt(None, [{"role": "user", "content": self.prompt}], self.max_tokens)


Prompts = Callable[[Random], Iterator[Prompt]]  # as many as are asked for, the same for one seed


@dataclass(frozen=True)
class Writer:
    """Writes requests' bodies for one server."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = False

    def body(self, prompt: Prompt) -> tuple[str, bytes]:
        """The path and the bytes."""
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
    """Its lines in an order of the seed, again and again. Raises ValueError with the line's number
    for what is no request."""
    read = list(_lines(path, max_tokens, chat))
    if not read:
        raise ValueError(f"{path} holds no prompt")

    def prompts(rng: Random) -> Iterator[Prompt]:
        return cycle(rng.sample(read, len(read)))

    return prompts


def _lines(path: Path, max_tokens: int | None, chat: bool) -> Iterator[Prompt]:
    try:
        text = path.read_text()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = _prompt_of(json.loads(line), max_tokens)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f"{path}, line {number}: takes a JSON object with `prompt`, a text, or `messages`, "
                "each with `role` and `content`; and `max_tokens`, a number from 1, if you like"
            ) from None
        if not (chat or prompt.prompt):
            raise ValueError(f"{path}, line {number}: is a conversation: give --endpoint chat")
        yield prompt.with_messages() if chat else prompt


def _prompt_of(row: dict[str, Any], max_tokens: int | None) -> Prompt:
    most = row.get("max_tokens", max_tokens)
    text, turns = row.get("prompt"), row.get("messages")
    good = (isinstance(text, str) and turns is None) or (
        text is None and all(turn["role"] and "content" in turn for turn in turns or [{}])
    )
    if not good or not (most is None or (isinstance(most, int) and most >= 1)):
        raise ValueError
    return Prompt(text, turns or (), most)


@dataclass(frozen=True)
class Scale:
    """How many tokens a server counts for a prompt of so many words; `told` where it has counted,
    else as English is."""

    fixed: float = 0.0
    a_word: float = TOKENS_A_WORD
    told: bool = False

    @classmethod
    def through(cls, few: tuple[int, int], many: tuple[int, int]) -> "Scale":
        """From (words, tokens) of two probes."""
        (words, tokens), (more_words, more_tokens) = few, many
        a_word = (more_tokens - tokens) / (more_words - words)
        if tokens < 1 or a_word <= 0:
            return cls()
        return cls(max(0.0, tokens - a_word * words), a_word, True)

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.fixed) / self.a_word))


def of_words(words: int, rng: Random, vocabulary: Sequence[str]) -> str:
    """So many, drawn at random: no two begin alike for long, so that none is found in a cache."""
    return " ".join(rng.choices(vocabulary, k=words))


def synthetic(
    inputs: Draw, outputs: Draw, scale: Scale, vocabulary: Sequence[str], chat: bool
) -> Prompts:
    """Prompts of random words whose lengths are drawn, and with each its `max_tokens`."""

    def prompts(rng: Random) -> Iterator[Prompt]:
        while True:
            text = of_words(scale.words(inputs(rng)), rng, vocabulary)
            prompt = Prompt(text, max_tokens=outputs(rng))
            yield prompt.with_messages() if chat else prompt

    return prompts


def demo_tasks(chat: bool, max_tokens: int | None = None) -> Prompts:
    """What the demo model was trained to do: right answers of every length."""
    from models.tasks import stream

    most = max_tokens or DEMO_MAX_TOKENS

    def prompts(rng: Random) -> Iterator[Prompt]:
        for example in stream(rng, held_out=False):
            if chat and not example.plain:
                yield Prompt(None, [_turn(each) for each in example.messages], most)
            elif not chat and example.plain:
                yield Prompt(f"{example.user}\n", max_tokens=most)

    return prompts


def _turn(said: "Message") -> dict[str, str]:
    return {"role": said["role"], "content": said["content"]}
