"""A load of every kind of request, and the answer of the engine alone to each of them.

Greedy and seeded sampling; answers of one token and of many, which end by an end token, a stop
string or their budget; two choices, shared prefixes, tenants, SLA classes; clients that cancel.
An answer must not depend on the batch that it runs in, so the expected answer is known.
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
class LoadRequest:
    """A request and its arrival time. The client cancels after `cancels_after` tokens, if any."""

    turns: Sequence[Mapping[str, str]]
    sampling: SamplingOptions
    at_s: float = 0.0
    sla: str = "standard"
    tenant: str = ""
    timeout_s: float | None = None
    cancels_after: int = 0

    @property
    def choices(self) -> int:
        return self.sampling.get("n", 1)


@dataclass(frozen=True)
class ExpectedAnswer:
    """The complete answer of one choice. `tokens` may go beyond a stop string, `text` does not."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason


def _sampling_of_kind(chance: Random, number: int) -> SamplingOptions:
    """The sampling options of request `number`; kinds follow one another cyclically."""
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
def load_requests() -> tuple[LoadRequest, ...]:
    """Half of the requests arrive at once, the others within half a second. All prompts differ."""
    chance = Random(5)
    distinct = {each.user: each for each in examples(11, 4 * COUNT, held_out=True)}
    return tuple(
        _load_request(chance, number, example)
        for number, example in enumerate(islice(distinct.values(), COUNT))
    )


def _load_request(chance: Random, number: int, example: Example) -> LoadRequest:
    user = {"role": "user", "content": example.user}
    shared = number % 4 == 0
    request = LoadRequest(
        turns=({"role": "system", "content": SYSTEM}, user) if shared else (user,),
        sampling=_sampling_of_kind(chance, number),
        at_s=0.0 if number % 2 else 0.5 * number / COUNT,
        sla=chance.choice(SLAS),
        tenant=chance.choice(TENANTS),
        timeout_s=300.0 if number % 5 == 0 else None,  # never reached
    )
    return replace(request, cancels_after=chance.randint(1, 30)) if number % 20 == 4 else request


@cache
def load_text() -> Text:
    return Text(demo_model())


@cache
def expected_answers() -> tuple[tuple[ExpectedAnswer, ...], ...]:
    """The choices of each request, from an engine with memory for all requests at once."""
    config = EngineConfig(
        model=demo_model(), dtype="float32", kv_tokens=65_536, host_gib=0, prefix_sharing=False
    )
    feeder = Feeder(Engine.load(config))
    for number, request in enumerate(load_requests()):
        prompt = load_text().encode_chat(request.turns)
        for choice in range(request.choices):
            name = f"{number}/{choice}"
            feeder.add(name, prompt, request.sampling["max_tokens"], sampling_of(request, choice))
    answers = feeder.run()
    return tuple(
        tuple(
            _expected_answer(request, answers[name], feeder.finished[name])
            for name in (f"{number}/{choice}" for choice in range(request.choices))
        )
        for number, request in enumerate(load_requests())
    )


def sampling_of(request: LoadRequest, choice: int) -> SamplingParams:
    """The worker's seed of a choice: choices of one prompt use consecutive seeds."""
    options: dict[str, Any] = {
        key: value
        for key, value in request.sampling.items()
        if key not in ("max_tokens", "n", "stop", "seed")
    }
    return SamplingParams(**options, seed=request.sampling.get("seed", 0) + choice)


def _expected_answer(
    request: LoadRequest, tokens: list[int], reason: FinishReason
) -> ExpectedAnswer:
    whole = load_text().decode(tokens)
    stop = request.sampling.get("stop")
    if isinstance(stop, str) and stop in whole:
        return ExpectedAnswer(tuple(tokens), whole[: whole.index(stop)], FinishReason.STOP)
    return ExpectedAnswer(tuple(tokens), whole, reason)


def oracle_lengths() -> list[tuple[str, str | None, int]]:
    """An oracle entry: a prompt, its instruction and the length of its longest choice."""
    rows = []
    for request, choices in zip(load_requests(), expected_answers(), strict=True):
        system = [turn["content"] for turn in request.turns if turn["role"] == "system"]
        longest = max(len(choice.tokens) for choice in choices)
        rows.append((request.turns[-1]["content"], system[0] if system else None, longest))
    return rows
