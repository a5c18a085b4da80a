"""Profiles a decode step by the engine's phases and by PyTorch's calls."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine.bare_engine import BareEngine
from benchmarks.engine.cases import DTYPES, Case, kv_tokens
from benchmarks.harness.throughput import make_prompts
from services.worker.engine.step import Engine
from services.worker.requests.types.batch import StepResult

STEP = "the loop"
PHASES: dict[str, tuple[str, ...]] = {  # paths of methods from an engine
    STEP: ("step",),
    "compose": ("_compose",),
    "inputs": ("_inputs.prepare",),
    "prepare": ("_kernels.prepare",),
    "forward": ("model.forward",),
    "attention": ("_kernels.store", "_kernels.attend"),
    "draw": ("_sampler.draw",),
    "commit": ("state.steps.commit",),
}
CHUNK_TOKENS = 256  # a step prefills at least this many
CALLS = 25  # rows of PyTorch's table
THREADS = torch.get_num_threads()  # read before an engine changes it


class Stopwatch:
    """Measures the time of each phase without its nested phases. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = perf_counter):
        self._clock = clock
        self._open: list[str] = []
        self._since_s = 0.0
        self.spent_s: dict[str, float] = defaultdict(float)

    def timed(self, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def within(*args: Any, **options: Any) -> Any:
            self._charge()
            self._open.append(phase)
            try:
                return call(*args, **options)
            finally:
                self._charge()
                self._open.pop()

        return within

    def take(self) -> dict[str, float]:
        """Returns and clears the time of each phase."""
        taken, self.spent_s = dict(self.spent_s), defaultdict(float)
        return taken

    def _charge(self) -> None:
        """Charges the time until now to the innermost phase."""
        now_s = self._clock()
        if self._open:
            self.spent_s[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


def watch(engine: Engine, stopwatch: Stopwatch) -> list[str]:
    """Times the phases of the engine's further steps; returns the phases that it lacks."""
    missing: dict[str, None] = {}
    for phase, paths in PHASES.items():
        for path in paths:
            try:
                owner: Any = engine
                *attributes, name = path.split(".")
                for attribute in attributes:
                    owner = getattr(owner, attribute)
                setattr(owner, name, stopwatch.timed(phase, getattr(owner, name)))
            except AttributeError:
                missing[phase] = None
    return list(missing)


@dataclass(frozen=True)
class Profile:
    """A decode step of `rows` with `context_tokens` each on average.

    phases_ms: medians over `steps`. missing: phases that the engine lacks. calls: PyTorch's table
    of one step.
    """

    rows: int
    context_tokens: float
    steps: int
    threads: int
    phases_ms: Mapping[str, float]
    missing: tuple[str, ...]
    calls: str


def profile_step(folder: str, dtype: str, case: Case) -> Profile:
    """Profiles a case in the middle of its answers."""
    torch.set_num_threads(THREADS)
    steps = max(1, case.output_tokens // 4)
    filling = -(-case.streams * case.prompt_tokens // CHUNK_TOKENS)
    before = max(0, (case.output_tokens - steps) // 2 - filling)
    output_tokens = filling + before + steps + 4
    longer = Case(case.context, case.streams, case.prompt_tokens, output_tokens)
    bare = BareEngine(folder, kv_tokens([longer]), DTYPES[dtype])
    engine = bare.engine
    bare.submit(make_prompts(case.streams, case.prompt_tokens, seed=0), output_tokens)
    result = _step(engine)
    while not _all_decode(result, case.streams):
        result = _step(engine)
    for _ in range(before):
        _step(engine)
    stopwatch = Stopwatch()
    missing = tuple(watch(engine, stopwatch))
    spent = []
    for _ in range(steps):
        result = _step(engine)
        spent.append(stopwatch.take())
    last_tokens = case.prompt_tokens + fmean(token.offset for token in result.tokens)
    phases_ms = {p: median(s.get(p, 0.0) for s in spent) * 1e3 for p in PHASES if p not in missing}
    return Profile(
        case.streams,
        last_tokens - (steps - 1) / 2,
        steps,
        torch.get_num_threads(),
        phases_ms,
        missing,
        _calls(engine),
    )


def _step(engine: Engine) -> StepResult:
    result = engine.step()
    if result is None:
        raise RuntimeError("the answers ended before the measured steps")
    return result


def _all_decode(result: StepResult, rows: int) -> bool:
    """Returns whether the step sampled a token for every request, and none was a first token."""
    return len(result.tokens) == rows and all(token.offset > 0 for token in result.tokens)


def _calls(engine: Engine) -> str:
    """Returns the table of a second profiled step; the first includes the profiler's start."""
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            _step(engine)
    table: str = profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=CALLS)
    return table
