"""A load of chat prompts for the demo model with answers of very different lengths.

As in published traces, most answers are short and a few are long: lengths are lognormal up to the
demo model's limit (360 tokens), and the prompt alone determines the length ("Write star 90
times."). No two prompts are equal, so that forecasting one means to generalise from others. The
same arguments produce the same load.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from foretoken.running.options import demo_model
from models.tasks import Example, examples

MEDIAN_TOKENS, SIGMA = 24, 1.3  # of the lognormal: a mean of twice the median, and a long tail
POOL = 80_000  # prompts to draw from, so that the rare long ones last for a whole run
BINS = 24  # of lengths, by their logarithm, within which all prompts are as likely
MAX_TOKENS = 1_024


@dataclass(frozen=True)
class Due:
    """A request of an open loop: sent at its time, whatever happened to earlier ones."""

    at_s: float
    body: bytes  # of POST /v1/chat/completions


def bodies(count: int, seed: int, model: str = "demo") -> list[bytes]:
    """So many requests; raises ValueError for more than the pool holds."""
    pool, _, odds = _pool()
    chosen = np.random.default_rng(seed).choice(len(pool), count, replace=False, p=odds)
    return [_body(pool[i], model, number) for number, i in enumerate(chosen)]


def arriving(some: list[bytes], rate: float, seed: int) -> list[Due]:
    """They come as a Poisson process of `rate` a second."""
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, len(some))
    return [Due(float(at), body) for at, body in zip(np.cumsum(gaps_s), some, strict=True)]


def at_once(some: list[bytes]) -> list[Due]:
    return [Due(0.0, body) for body in some]


def write_lengths(path: Path) -> None:
    """Writes the length of the right answer of every prompt of the pool, for an oracle
    (`predictor.oracle_file`). The demo model's answer has it for 99 of 100."""
    pool, lengths, _ = _pool()
    told = (
        {"instruction": e.system or "", "prompt": e.user, "output_tokens": tokens}
        for e, tokens in zip(pool, lengths, strict=True)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in told))


@cache
def _pool() -> tuple[list[Example], list[int], np.ndarray]:
    """Chats, how long their right answers are, and the odds at which drawing them makes the
    lengths lognormal."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    distinct = {(e.system, e.user): e for e in examples(0, POOL, held_out=False) if not e.plain}
    pool = list(distinct.values())
    encoded = tokenizer([e.answer for e in pool], add_special_tokens=False)["input_ids"]
    lengths = [len(ids) + 1 for ids in encoded]  # one more ends it
    log_length = np.log(lengths)
    edges = np.linspace(log_length.min(), log_length.max(), BINS + 1)
    bins = np.clip(np.digitize(log_length, edges) - 1, 0, BINS - 1)
    wanted = np.exp(-(((log_length - np.log(MEDIAN_TOKENS)) / SIGMA) ** 2) / 2)
    odds = wanted / np.bincount(bins, minlength=BINS)[bins]
    return pool, lengths, odds / odds.sum()


def _body(example: Example, model: str, seed: int) -> bytes:
    return json.dumps(
        {
            "model": model,
            "messages": example.messages,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
