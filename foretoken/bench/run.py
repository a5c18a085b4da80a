"""A benchmark, from the first question to the last answer: servers asked what they serve, warmed
up, and loaded in turns.

Where servers are compared, each round loads one after the other with the same requests at the same
times, every other round backwards, so that a machine that slows down slows all of them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random

from foretoken.bench.client import Server
from foretoken.bench.drive import Progress, Round, Target, drive
from foretoken.bench.lengths import Draw
from foretoken.bench.load import Load
from foretoken.bench.measures import Budgets, Figures, figures
from foretoken.bench.prompts import (
    Prompt,
    Prompts,
    Scale,
    Writer,
    demo_tasks,
    of_words,
    synthetic,
)
from foretoken.bench.samples import Sample
from foretoken.bench.served import Served, find_served

PROBE_WORDS = (8, 108)
WARM_AT_ONCE = 4


@dataclass(frozen=True)
class Asking:
    """What is asked for: a file's prompts, else lengths, else what suits the model.

    `vocabulary` are the words of synthetic prompts. ignore_eos: None where a drawn length of the
    answer is to be kept to, which it is for synthetic prompts.
    """

    vocabulary: Sequence[str]
    file: Prompts | None = None
    inputs: Draw | None = None
    outputs: Draw | None = None
    default_inputs: Draw = lambda _: 128
    default_outputs: Draw = lambda _: 64
    max_tokens: int | None = None
    chat: bool = True
    temperature: float = 0.0
    ignore_eos: bool | None = None

    def suits_demo(self, served: Served) -> bool:
        return served.is_demo and not (self.file or self.inputs or self.outputs)


@dataclass(frozen=True)
class Plan:
    """A whole benchmark."""

    urls: Sequence[str]
    load: Load
    asking: Asking
    classes: Mapping[str, Budgets]
    model: str = ""
    api_key: str = ""
    as_classes: tuple[str, ...] = ()
    rounds: int = 1
    warm_up: int = 8
    timeout_s: float = 300.0
    seed: int = 0


@dataclass
class Outcome:
    """What one server did, round by round. `asked` says what prompts it got."""

    url: str
    model: str
    asked: str
    rounds: list[Round] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)


Tell = Callable[[str, Load, Progress], None]  # what is going on, of which load, how far


async def bench(plan: Plan, stop: asyncio.Event, tell: Tell) -> list[Outcome]:
    """Every server's outcome, as far as it got when `stop` was set. Raises ValueError, a sentence,
    where a server can't be loaded."""
    async with AsyncExitStack() as stack:
        targets: list[Target] = []
        outcomes: list[Outcome] = []
        for url in plan.urls:
            server = Server(url, plan.api_key)
            stack.push_async_callback(server.close)
            served = await find_served(server, plan.model)
            target, asked = await _target(plan, server, served)
            targets.append(target)
            outcomes.append(Outcome(str(server.address), served.model, asked))
        if plan.warm_up:
            warm = Load(requests=plan.warm_up, concurrency=WARM_AT_ONCE)
            for target, outcome in zip(targets, outcomes, strict=True):
                progress = _told(tell, outcome, warm)
                _require_some(outcome, await drive(target, warm, plan.seed - 1, stop, progress))
        for number in range(plan.rounds):
            order = range(len(targets))[:: -1 if number % 2 else 1]
            for place in order:
                if stop.is_set():
                    return outcomes
                target, outcome = targets[place], outcomes[place]
                progress = _told(tell, outcome, plan.load, number, plan.rounds)
                went = await drive(target, plan.load, plan.seed + number, stop, progress)
                outcome.rounds.append(went)
                outcome.figures.append(figures(went.samples, went.lasted_s, plan.classes, went.cpu))
        return outcomes


def _told(tell: Tell, outcome: Outcome, load: Load, number: int = -1, rounds: int = 1) -> Progress:
    what = f"warming up {outcome.url}" if number < 0 else outcome.url
    if number >= 0 and rounds > 1:
        what += f", round {number + 1} of {rounds}"
    progress = Progress(lambda now: tell(what, load, now))
    tell(what, load, progress)
    return progress


def _require_some(outcome: Outcome, warmed: Round) -> None:
    """A server that answers none of the first requests right is not measured."""
    problems = [s.problem for s in warmed.samples]
    if problems and all(problems) and not warmed.stopped:
        raise ValueError(f"{outcome.url} answers no request: {problems[0]}")


async def _target(plan: Plan, server: Server, served: Served) -> tuple[Target, str]:
    """Whom to ask for what, and that in words."""
    asking = plan.asking
    if asking.file:
        prompts, asked, synthetic_ = asking.file, "prompts of a file", False
    elif asking.suits_demo(served):
        prompts = demo_tasks(asking.chat, asking.max_tokens)
        asked, synthetic_ = "the demo's tasks", False
    else:
        scale = await _scale(plan, server, served)
        inputs = asking.inputs or asking.default_inputs
        outputs = asking.outputs or asking.default_outputs
        prompts = synthetic(inputs, outputs, scale, asking.vocabulary, asking.chat)
        sized = "as the server counts" if scale.told else f"taken as {scale.a_word:g} tokens a word"
        asked, synthetic_ = f"random words, {sized}", True
    ignore_eos = synthetic_ if asking.ignore_eos is None else asking.ignore_eos
    writer = Writer(served.model, asking.temperature, ignore_eos)
    return Target(server, writer, prompts, plan.timeout_s, plan.as_classes), asked


async def _scale(plan: Plan, server: Server, served: Served) -> Scale:
    """How the server counts words, by two short prompts."""
    writer, counted = Writer(served.model), []
    for words in PROBE_WORDS:
        text = of_words(words, Random(plan.seed), plan.asking.vocabulary)
        prompt = Prompt(text, max_tokens=1)
        path, body = writer.body(prompt.with_messages() if plan.asking.chat else prompt)
        sample = Sample(0.0)
        await server.ask(path, body, sample, 0.0, plan.timeout_s)
        if sample.problem:
            raise ValueError(f"{server.address} answers no request: {sample.problem}")
        counted.append((words, sample.prompt_tokens))
    return Scale.through(counted[0], counted[1])
