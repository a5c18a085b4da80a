"""A load of chat requests for the demo model with answers of very different lengths.

Lengths are lognormal up to the demo model's limit (360 tokens): as in published traces, most
answers are short and a few are long. The prompt alone determines the length ("Write star 90
times."). No two prompts are equal, so that a forecast must generalise from other prompts. The same
arguments produce the same load.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from transformers import AutoTokenizer

from benchmarks.overload.prompt_pool import PromptPool
from foretoken.running.options import demo_model
from models.tasks import examples

MEDIAN_TOKENS, SIGMA = 24, 1.3  # of the lognormal: its mean is twice the median
POOL = 80_000  # prompts to draw from, so that the rare long ones last for a whole run
BINS = 24  # of log length; all prompts of a bin are equally likely
MAX_TOKENS = 1_024


@dataclass(frozen=True)
class DueRequest:
    """A request of an open loop, sent at its time whatever the state of earlier ones."""

    due_s: float
    body: bytes  # of POST /v1/chat/completions


def draw_bodies(count: int, seed: int, model: str = "demo") -> list[bytes]:
    """Draws request bodies. Raises ValueError for more than the pool holds."""
    return demo_pool().draw_bodies(count, seed, model)


def poisson_load(bodies: list[bytes], rate: float, seed: int) -> list[DueRequest]:
    """Returns arrivals of a Poisson process of `rate` per second."""
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, len(bodies))
    due_s = np.cumsum(gaps_s).tolist()
    return [DueRequest(*request) for request in zip(due_s, bodies, strict=True)]


def burst_load(bodies: list[bytes]) -> list[DueRequest]:
    """Returns requests that are all due at the start."""
    return [DueRequest(0.0, body) for body in bodies]


@cache
def demo_pool() -> PromptPool:
    """Chats with the lengths of their correct answers, which the demo model's answers have for 99
    of 100 prompts, and the probabilities that make the drawn lengths lognormal."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    distinct = {(e.system, e.user): e for e in examples(0, POOL, held_out=False) if not e.plain}
    pool = list(distinct.values())
    encoded = tokenizer([e.answer for e in pool], add_special_tokens=False)["input_ids"]
    lengths = [len(ids) + 1 for ids in encoded]  # with the end token
    log_length = np.log(lengths)
    edges = np.linspace(log_length.min(), log_length.max(), BINS + 1)
    bins = np.clip(np.digitize(log_length, edges) - 1, 0, BINS - 1)
    density = np.exp(-(((log_length - np.log(MEDIAN_TOKENS)) / SIGMA) ** 2) / 2)
    weights = density / np.bincount(bins, minlength=BINS)[bins]
    return PromptPool([e.messages for e in pool], lengths, MAX_TOKENS, weights / weights.sum())
