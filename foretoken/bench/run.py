"""Runs a benchmark: finds the served models, warms the servers up, and loads them in turns.

To compare servers, each round loads one after the other with the same requests at the same times.
Every other round runs in reverse order, so that a machine that slows down affects all of them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random

from foretoken.bench.drive import LoadProgress, Round, Target, drive
from foretoken.bench.lengths import Draw
from foretoken.bench.load import Load
from foretoken.bench.measures import Budgets, Figures, figures
from foretoken.bench.prompts import (
    Prompt,
    Prompts,
    TokenScale,
    demo_tasks,
    random_words,
    synthetic,
)
from foretoken.bench.samples import Sample
from foretoken.bench.served import AnyServer, ServedModel, find_model, open_server

PROBE_WORDS = (8, 108)
WARM_UP_CONCURRENCY = 4


@dataclass(frozen=True)
class Workload:
    """The requests to send: prompts of a file, synthetic prompts, or the demo model's tasks.

    `vocabulary` holds the words of synthetic prompts. `ignore_eos` None ignores EOS for synthetic
    prompts: their answers have drawn lengths.
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

    def suits_demo(self, served: ServedModel) -> bool:
        return served.is_demo and not (self.file or self.inputs or self.outputs)


@dataclass(frozen=True)
class Plan:
    """A whole benchmark."""

    urls: Sequence[str]
    load: Load
    workload: Workload
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
    """The results of one server, round by round. `workload` describes its prompts."""

    url: str
    model: str
    workload: str
    rounds: list[Round] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)


OnProgress = Callable[[str, Load, LoadProgress], None]  # what runs, its load, and how far


async def bench(plan: Plan, stop: asyncio.Event, on_progress: OnProgress) -> list[Outcome]:
    """Returns the outcome of every server, partial if `stop` is set.

    Raises ValueError if a server cannot be loaded.
    """
    async with AsyncExitStack() as stack:
        targets: list[Target] = []
        outcomes: list[Outcome] = []
        for url in plan.urls:
            server = open_server(url, plan.api_key)
            stack.push_async_callback(server.close)
            served = await find_model(server, plan.model)
            target, workload = await _target(plan, server, served)
            targets.append(target)
            outcomes.append(Outcome(str(server.address), served.model, workload))
        if plan.warm_up:
            warm = Load(requests=plan.warm_up, concurrency=WARM_UP_CONCURRENCY)
            for target, outcome in zip(targets, outcomes, strict=True):
                progress = _track(on_progress, outcome, warm)
                _require_answers(outcome, await drive(target, warm, plan.seed - 1, stop, progress))
        for number in range(plan.rounds):
            order = range(len(targets))[:: -1 if number % 2 else 1]
            for place in order:
                if stop.is_set():
                    return outcomes
                target, outcome = targets[place], outcomes[place]
                progress = _track(on_progress, outcome, plan.load, number, plan.rounds)
                result = await drive(target, plan.load, plan.seed + number, stop, progress)
                outcome.rounds.append(result)
                outcome.figures.append(
                    figures(result.samples, result.lasted_s, plan.classes, result.cpu)
                )
        return outcomes


def _track(
    on_progress: OnProgress, outcome: Outcome, load: Load, number: int = -1, rounds: int = 1
) -> LoadProgress:
    what = f"warming up {outcome.url}" if number < 0 else outcome.url
    if number >= 0 and rounds > 1:
        what += f", round {number + 1} of {rounds}"
    progress = LoadProgress(lambda now: on_progress(what, load, now))
    on_progress(what, load, progress)
    return progress


def _require_answers(outcome: Outcome, warmed: Round) -> None:
    """Raises ValueError if no warm-up request succeeded."""
    problems = [s.problem for s in warmed.samples]
    if problems and all(problems) and not warmed.stopped:
        raise ValueError(f"{outcome.url} fails every request: {problems[0]}")


async def _target(plan: Plan, server: AnyServer, served: ServedModel) -> tuple[Target, str]:
    """Returns the target and a description of its prompts."""
    workload = plan.workload
    if workload.file:
        prompts, described, synthetic_ = workload.file, "prompts of a file", False
    elif workload.suits_demo(served):
        prompts = demo_tasks(workload.chat, workload.max_tokens)
        described, synthetic_ = "the demo model's tasks", False
    else:
        scale = await _scale(plan, server, served)
        inputs = workload.inputs or workload.default_inputs
        outputs = workload.outputs or workload.default_outputs
        prompts = synthetic(inputs, outputs, scale, workload.vocabulary, workload.chat)
        unit = "server tokens" if scale.measured else f"{scale.per_word:g} tokens per word"
        described, synthetic_ = f"random words, {unit}", True
    ignore_eos = synthetic_ if workload.ignore_eos is None else workload.ignore_eos
    writer = server.writer(served.model, workload.temperature, ignore_eos)
    return Target(server, writer, prompts, plan.timeout_s, plan.as_classes), described


async def _scale(plan: Plan, server: AnyServer, served: ServedModel) -> TokenScale:
    """Measures the server's tokens per word with two short prompts."""
    writer, counted = server.writer(served.model), []
    for words in PROBE_WORDS:
        text = random_words(words, Random(plan.seed), plan.workload.vocabulary)
        prompt = Prompt(text, max_tokens=1)
        path, body = writer.body(prompt.with_messages() if plan.workload.chat else prompt)
        sample = Sample(0.0)
        await server.stream(path, body, sample, 0.0, plan.timeout_s)
        if sample.problem:
            raise ValueError(f"{server.address} fails every request: {sample.problem}")
        counted.append((words, sample.prompt_tokens))
    return TokenScale.from_probes(counted[0], counted[1])
