"""Pools of chat requests with known lengths of answers, and the bodies drawn from them."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from services.forecast import Floats
from services.worker.emulation.lengths import read_lengths

Chat = Sequence[Mapping[str, object]]
# Of prompts and answers in a file. A token has a byte or more, so that both fit into a context of
# 8,192 tokens; of a shorter context each may fill a half.
MOST_PROMPT_BYTES, MOST_OUTPUT_TOKENS = 4_096, 2_048
TEMPLATE_TOKENS = 64  # of a prompt's half, for the chat template


@dataclass(frozen=True)
class PromptPool:
    """Chats, the lengths of their answers, and the probability of each to be drawn.

    Without probabilities all are equally likely, and more than the pool holds may be drawn, with
    repeats.
    """

    chats: Sequence[Chat]
    lengths: Sequence[int]
    max_tokens: int  # of every request
    probabilities: Floats | None = None

    @property
    def median_tokens(self) -> float:
        """The median length; with probabilities, of the pool, not of what is drawn."""
        return median(self.lengths)

    @property
    def mean_tokens(self) -> float:
        """The mean length of what is drawn."""
        return float(np.average(self.lengths, weights=self.probabilities))

    def draw_bodies(
        self, count: int, seed: int, model: str = "demo", classes: Sequence[int] = ()
    ) -> list[bytes]:
        """Draws request bodies. With `classes`, ascending numbers of tokens, each has its class of
        length as `priority`, 0 for the shortest. Raises ValueError for more than a pool with
        probabilities holds."""
        rng = np.random.default_rng(seed)
        repeats = self.probabilities is None and count > len(self.chats)
        chosen = rng.choice(len(self.chats), count, replace=repeats, p=self.probabilities)
        return [
            json.dumps(
                self.fields(i) | {"model": model, "seed": number} | self._priority(i, classes)
            ).encode()
            for number, i in enumerate(chosen)
        ]

    def _priority(self, i: int, classes: Sequence[int]) -> dict[str, int]:
        return {"priority": bisect_left(classes, self.lengths[i])} if classes else {}

    def write_lengths(self, path: Path) -> None:
        """Writes the length of the answer of every chat, for an oracle (`predictor.oracle_file`)
        and for emulated engines (`--emulate-lengths`)."""
        rows = (
            {**_wording(chat), "output_tokens": tokens}
            for chat, tokens in zip(self.chats, self.lengths, strict=True)
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fields(self, i: int) -> dict[str, object]:
        """What a request for the answer to chat `i` asks for."""
        return {
            "messages": self.chats[i],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@cache
def file_pool(path: str, context_tokens: int) -> PromptPool:
    """The prompts of a file for `--emulate-lengths` that fit into the context with their answers.

    Raises ValueError with a sentence if the file cannot be used, or none fits.
    """
    half = context_tokens // 2
    most_bytes = min(MOST_PROMPT_BYTES, half - TEMPLATE_TOKENS)
    most_tokens = min(MOST_OUTPUT_TOKENS, half)
    fitting = {
        prompt: tokens
        for prompt, tokens in read_lengths(Path(path)).items()
        if prompt and len(prompt.encode()) <= most_bytes and tokens <= most_tokens
    }
    if not fitting:
        raise ValueError(
            f"{path}: no prompt has at most {most_bytes:,} bytes and an answer of at most "
            f"{most_tokens:,} tokens"
        )
    chats = [({"role": "user", "content": prompt},) for prompt in fitting]
    return PromptPool(chats, list(fitting.values()), most_tokens)


def _wording(chat: Chat) -> dict[str, str]:
    turns = {str(turn["role"]): str(turn["content"]) for turn in chat}
    return {"instruction": turns.get("system", ""), "prompt": turns["user"]}
