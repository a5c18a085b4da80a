"""An emulated engine and the simulator's worker, driven by the same commands in virtual time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

import numpy as np

from services.core import Plan, Report
from services.costs import CostModel
from services.worker.emulation.answers import Answers, LengthLaw
from services.worker.emulation.engine import EmulatedEngine
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt
from simulator.engine.events import Command, UploadEnd
from simulator.engine.worker import MORE, SimWorker, WorkerOptions
from simulator.hardware.hardware import EOS, Hardware

VOCABULARY = 10_000
Timed = tuple[float, Plan | Prompt]


@dataclass
class VirtualClock:
    """Sleeps without waiting. `late_s` is added to every sleep, as a busy machine does."""

    time_s: float = 0.0
    late_s: float = 0.0
    slept: list[float] = field(default_factory=list)  # the times at which sleeps were to end

    def now(self) -> float:
        return self.time_s

    def sleep_until(self, time_s: float) -> None:
        self.slept.append(time_s)
        self.time_s = max(self.time_s, time_s + self.late_s)


@dataclass
class Step:
    """What can be seen of a worker after a step."""

    end_s: float
    tokens: list[NewToken]
    free_blocks: tuple[int, int]
    report: Report | None


@dataclass
class Run:
    steps: list[Step] = field(default_factory=list)

    def record(self, end_s: float, tokens: list[NewToken], state: WorkerState) -> None:
        state.check_integrity()
        free = state.pool.free_blocks, state.host.free_blocks
        self.steps.append(Step(end_s, tokens + state.ends.pop_late(), free, state.report()))


def engine_with(
    cost: CostModel,
    limits: Limits,
    clock: VirtualClock,
    lengths: Mapping[str, int] | None = None,
    attends_padding: bool = False,
) -> EmulatedEngine:
    """An engine with answers of these lengths, by the text of the prompt's ids, that draws the
    simulator's tokens."""
    answers = Answers([MORE], EOS, LengthLaw(1e9, 0.0), lengths, lambda ids: [str(list(ids))])
    return EmulatedEngine("test", cost, limits, answers, VOCABULARY, attends_padding, clock)


def emulate(hardware: Hardware, commands: Sequence[Timed], lengths: Mapping[str, int]) -> Run:
    """The steps of the emulated engine. Between two steps it receives the commands that are due."""
    prompts = [command for _, command in commands if isinstance(command, Prompt)]
    known = {str(list(each.token_ids)): lengths[each.request_id] for each in prompts}
    clock = VirtualClock()
    limits = hardware.limits(prefix_sharing=True)
    engine = engine_with(hardware.cost, limits, clock, known, hardware.attends_padding)
    engine.state.attach()
    run, waiting = Run(), list(commands)
    while True:
        while waiting and waiting[0][0] <= clock.now():
            time_s, command = waiting.pop(0)
            if isinstance(command, Plan):
                engine.state.apply_plan(command, time_s)
            else:
                assert engine.add(command, time_s) is None
        if result := engine.step():
            run.record(clock.now(), result.tokens, engine.state)
        elif waiting:
            clock.time_s = waiting[0][0]
        else:
            return run


def simulate(hardware: Hardware, commands: Sequence[Timed], lengths: Mapping[str, int]) -> Run:
    """The steps of the simulator's worker. While it waits for an upload, commands wait, too, as in
    an engine."""
    prompts = [command for _, command in commands if isinstance(command, Prompt)]
    ends = np.zeros(len(prompts), np.int64)  # requests are named by their rows
    for prompt in prompts:
        ends[int(prompt.request_id)] = prompt.prompt_tokens + lengths[prompt.request_id]
    options = WorkerOptions(jumps=False, prefix_sharing=True, timed=True)
    worker = SimWorker(0, hardware, ends, options)
    order, run = count(), Run()
    events: list[tuple[float, int, Command | None]] = []
    uploads = 0
    for time_s, command in commands:
        heappush(events, (time_s, next(order), command))
    while events:
        now, _, event = heappop(events)
        if event is None:
            run.record(now, worker.finish().tokens, worker.state)
        else:
            uploads -= isinstance(event, UploadEnd)
            worker.receive(event, now)
            if worker.span or (uploads and not isinstance(event, UploadEnd)):
                continue
        for end_s, upload in worker.begin(now):
            uploads += 1
            heappush(events, (end_s, next(order), upload))
        if worker.span:
            heappush(events, (worker.span.end_s, next(order), None))
    return run
