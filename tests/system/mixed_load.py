"""A load of every kind of request, and what the engine alone answers to each of them.

Greedy and seeded, answers of one token and of many, that end by themselves, by a stop string or by
their budget; two choices at once, common beginnings, tenants, SLA classes; and clients that hang up
half-way. Nothing about an answer may depend on who runs beside it, so it is known beforehand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from random import Random
from typing import Any

from foretoken.client.answers import SamplingOptions
from foretoken.running.options import demo_model
from gateway.requests.text import Text
from models.tasks import Example, examples
from services.core import FinishReason
from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.requests.types.prompt import SamplingParams
from tests.worker.worker_fixtures import Feeder

COUNT = 200
LONGEST = 80  # output tokens
SYSTEM = (
    "You are a careful assistant. Read the task twice, answer it with nothing but the result, and "
    "keep the spelling of every word that you are given."
)
SLAS = ("interactive", "standard", "batch")
TENANTS = ("", "ann", "bob")
STOPS = (" ", "e", "o")


@dataclass(frozen=True)
class Ask:
    """A request, when it comes, and after how many tokens its client hangs up; 0: never."""

    turns: Sequence[Mapping[str, str]]
    sampling: SamplingOptions
    at_s: float = 0.0
    sla: str = "standard"
    tenant: str = ""
    timeout_s: float | None = None
    hangs_up: int = 0

    @property
    def choices(self) -> int:
        return self.sampling.get("n", 1)


@dataclass(frozen=True)
class Expected:
    """One choice's whole answer. Of one that a stop string cuts, tokens beyond it may be shown."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason


def _kinds(chance: Random, number: int) -> SamplingOptions:
    """The sampling of every kind of request, one after the other."""
    seeded: SamplingOptions = {"temperature": 1.0, "top_p": 0.95, "seed": number}
    greedy: SamplingOptions = {"temperature": 0.0}
    short, long = chance.randint(1, 8), chance.randint(30, LONGEST)
    kinds: tuple[SamplingOptions, ...] = (
        {**greedy, "max_tokens": LONGEST},  # ends by itself
        {**greedy, "max_tokens": short, "ignore_eos": True},
        {**seeded, "max_tokens": chance.randint(9, 40), "ignore_eos": True},
        {**seeded, "max_tokens": LONGEST},
        {**greedy, "max_tokens": long, "ignore_eos": True},
        {**seeded, "max_tokens": LONGEST, "n": 2},
        {**seeded, "max_tokens": LONGEST, "ignore_eos": True, "stop": chance.choice(STOPS)},
        {**seeded, "max_tokens": chance.randint(9, 40), "min_tokens": 9, "repetition_penalty": 1.2},
        {**seeded, "max_tokens": short},
        {**greedy, "max_tokens": long, "ignore_eos": True},
    )
    return kinds[number % len(kinds)]


@cache
def asks() -> tuple[Ask, ...]:
    """Half of them at once, the others within half a second. All prompts differ."""
    chance = Random(5)
    distinct = {each.user: each for each in examples(11, 4 * COUNT, held_out=True)}
    return tuple(
        _ask(chance, number, example)
        for number, example in enumerate(islice(distinct.values(), COUNT))
    )


def _ask(chance: Random, number: int, example: Example) -> Ask:
    user = {"role": "user", "content": example.user}
    shared = number % 4 == 0
    ask = Ask(
        turns=({"role": "system", "content": SYSTEM}, user) if shared else (user,),
        sampling=_kinds(chance, number),
        at_s=0.0 if number % 2 else 0.5 * number / COUNT,
        sla=chance.choice(SLAS),
        tenant=chance.choice(TENANTS),
        timeout_s=300.0 if number % 5 == 0 else None,  # ample: it is no answer's end
    )
    return replace(ask, hangs_up=chance.randint(1, 30)) if number % 20 == 4 else ask


@cache
def text() -> Text:
    return Text(demo_model())


@cache
def expected() -> tuple[tuple[Expected, ...], ...]:
    """Of each request its choices, by an engine that has memory for all of them."""
    config = EngineConfig(
        model=demo_model(), dtype="float32", kv_tokens=65_536, host_gib=0, prefix_sharing=False
    )
    feeder = Feeder(Engine.load(config))
    for number, ask in enumerate(asks()):
        prompt = text().encode_chat(ask.turns)
        for choice in range(ask.choices):
            name = f"{number}/{choice}"
            feeder.add(name, prompt, ask.sampling["max_tokens"], sampling_of(ask, choice))
    made = feeder.run()
    return tuple(
        tuple(
            _ended(ask, made[name], feeder.finished[name])
            for name in (f"{number}/{choice}" for choice in range(ask.choices))
        )
        for number, ask in enumerate(asks())
    )


def sampling_of(ask: Ask, choice: int) -> SamplingParams:
    """The worker's seed of a choice: choices of one prompt use consecutive seeds."""
    told: dict[str, Any] = {
        key: value
        for key, value in ask.sampling.items()
        if key not in ("max_tokens", "n", "stop", "seed")
    }
    return SamplingParams(**told, seed=ask.sampling.get("seed", 0) + choice)


def _ended(ask: Ask, tokens: list[int], reason: FinishReason) -> Expected:
    whole = text().decode(tokens)
    stop = ask.sampling.get("stop")
    if isinstance(stop, str) and stop in whole:
        return Expected(tuple(tokens), whole[: whole.index(stop)], FinishReason.STOP)
    return Expected(tuple(tokens), whole, reason)


def lengths() -> list[tuple[str, str | None, int]]:
    """An oracle entry: a prompt, its instruction and the length of its longest choice."""
    told = []
    for ask, choices in zip(asks(), expected(), strict=True):
        system = [turn["content"] for turn in ask.turns if turn["role"] == "system"]
        longest = max(len(choice.tokens) for choice in choices)
        told.append((ask.turns[-1]["content"], system[0] if system else None, longest))
    return told
