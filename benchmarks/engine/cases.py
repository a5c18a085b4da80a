"""Cases of the engine benchmark: models, contexts and streams, with their estimated durations."""

import re
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import ceil

from benchmarks.harness.system import VLLM_BLOCK_TOKENS
from services.worker.config import DtypeName

BARE_LOOPS = ("engine", "vllm")  # their prefill is measured separately
SYSTEMS = ("engine", "grpc", "http", "transformers", "vllm", "vllm_http")
DEFAULT_SYSTEMS = SYSTEMS[:-1]  # two processes of vLLM hold the weights twice
PEER_SYSTEMS = ("vllm", "vllm_http")  # need --peer-python
DTYPES: Mapping[str, DtypeName] = {"fp32": "float32", "bf16": "bfloat16"}
CONTEXTS = {160: (32, 256), 1_500: (1_500, 64)}  # prompt and output tokens
STREAMS = (1, 8, 32, 64)
QUICK_STREAMS = (1, 8)
QUICK_OUTPUT_TOKENS = 32
QUICK_REPEATS = 2
BLOCK_TOKENS = VLLM_BLOCK_TOKENS  # a multiple of the engine's
KV_FACTOR = 1.5  # of what a case holds at its end, so that no request waits for memory
MIN_KV_TOKENS = 8_192
START_S = {
    "engine": 5.0,
    "grpc": 12.0,
    "http": 0.0,  # included in the system of grpc
    "transformers": 5.0,
    "vllm": 60.0,
    "vllm_http": 60.0,
}
TOKENS = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class Costs:
    """Approximate seconds on two cores, for the estimated duration only. A step costs `step_s`,
    plus `row_s` per row and `context_token_s` per token of context."""

    prompt_token_s: float
    step_s: float
    row_s: float
    context_token_s: float


@dataclass(frozen=True)
class Model:
    """A measured model.

    output_tokens: maximum per answer. starts: measured cold starts. target: throughput of the
    engine relative to vLLM. threads: of systems that do not select a number, 0 for
    PyTorch's default.
    """

    name: str
    output_tokens: int
    repeats: int
    starts: int
    target: float
    threads: int
    costs: Costs


MODELS = {
    "demo": Model("demo", 256, 5, 5, 1.25, 1, Costs(1e-4, 4e-3, 1e-4, 8e-7)),
    "padded": Model("padded", 128, 5, 1, 1.25, 0, Costs(5e-4, 6e-3, 6e-4, 1e-6)),
    "qwen3-0.6b": Model("qwen3-0.6b", 16, 3, 1, 1.1, 0, Costs(0.012, 0.15, 8e-3, 2e-6)),
}


@dataclass(frozen=True)
class Case:
    """`streams` equal requests at once. `context` is a key of CONTEXTS."""

    context: int
    streams: int
    prompt_tokens: int
    output_tokens: int

    @property
    def max_tokens(self) -> int:
        """Length of one request at its end, in whole blocks."""
        return BLOCK_TOKENS * ceil((self.prompt_tokens + self.output_tokens) / BLOCK_TOKENS)

    @property
    def kv_tokens(self) -> int:
        return self.streams * self.max_tokens


@dataclass(frozen=True)
class RunPlan:
    """Measurements of one run. `systems` has the order of SYSTEMS, without vLLM's if `peer_python`
    is empty. Measurements that are estimated to take longer than `patience_s` are omitted."""

    models: tuple[Model, ...]
    systems: tuple[str, ...]
    dtypes: tuple[str, ...]
    contexts: tuple[int, ...]
    streams: tuple[int, ...]
    quick: bool
    peer_python: str
    patience_s: float

    def repeats(self, model: Model) -> int:
        return min(model.repeats, QUICK_REPEATS) if self.quick else model.repeats

    def starts(self, model: Model) -> int:
        return 1 if self.quick else model.starts

    def cases(self, model: Model) -> list[Case]:
        """Cases that at least one system can measure in time, in order of context, then streams."""
        return [case for case in self._all_cases(model) if self.measured_systems(model, case)]

    def measured_systems(self, model: Model, case: Case) -> list[str]:
        return [s for s in self.systems if estimated_s(model, case, s) <= self.patience_s]

    def _all_cases(self, model: Model) -> list[Case]:
        most = min(model.output_tokens, QUICK_OUTPUT_TOKENS) if self.quick else model.output_tokens
        return [
            Case(context, streams, CONTEXTS[context][0], min(CONTEXTS[context][1], most))
            for context in self.contexts
            for streams in self.streams
        ]

    def omitted(self) -> list[str]:
        """Returns one line per case with omitted systems."""
        lines = []
        for model in self.models:
            for case in self._all_cases(model):
                measured = self.measured_systems(model, case)
                slow = [system for system in self.systems if system not in measured]
                omitted = ", ".join(slow) if measured else "all systems"
                if slow:
                    where = f"{model.name}, context {case.context}, {case.streams} streams"
                    lines.append(f"{where}: {omitted}")
        return lines


def kv_tokens(cases: list[Case]) -> int:
    """Returns a KV size with room for all requests, in whole blocks."""
    most = max(case.kv_tokens for case in cases)
    return BLOCK_TOKENS * ceil(max(KV_FACTOR * most, MIN_KV_TOKENS) / BLOCK_TOKENS)


def estimated_s(model: Model, case: Case, system: str) -> float:
    """Estimates the duration of one measurement. transformers attends over all requests' KV for
    every row and slows down with their number: 1.6 times the engine at 8 streams of 160, 4 times at
    64."""
    costs, streams = model.costs, case.streams
    mean_tokens = case.prompt_tokens + case.output_tokens / 2
    step_s = costs.step_s + streams * (costs.row_s + mean_tokens * costs.context_token_s)
    prefill_s = streams * case.prompt_tokens * costs.prompt_token_s
    slower = 1.5 + streams * mean_tokens / 4_000 if system == "transformers" else 1.0
    return slower * (prefill_s + case.output_tokens * step_s)


def estimated_run_s(plan: RunPlan) -> float:
    total_s = 0.0
    for model in plan.models:
        round_s = sum(
            estimated_s(model, case, system) * (1.5 if system in BARE_LOOPS else 1)
            for case in plan.cases(model)
            for system in plan.measured_systems(model, case)
        )
        starts_s = sum(START_S[system] for system in plan.systems)
        starts_s += (plan.starts(model) - 1) * START_S["grpc"]
        total_s += len(plan.dtypes) * (starts_s + plan.repeats(model) * round_s)
    return total_s


def make_run_plan(options: Namespace) -> RunPlan:
    """Raises SystemExit with a sentence for anything that cannot be measured."""
    quick = bool(options.quick)
    small = quick or options.profile
    models = _names("--models", options.models or ("demo" if small else ",".join(MODELS)), MODELS)
    dtypes = _names("--dtypes", options.dtypes or ",".join(DTYPES), DTYPES)
    contexts = [str(context) for context in CONTEXTS]
    chosen = options.contexts or ("160" if small else ",".join(contexts))
    if options.patience <= 0:
        raise SystemExit(f"--patience takes seconds above 0, got {options.patience:g}")
    plan = RunPlan(
        tuple(MODELS[name] for name in models),
        _systems(options.systems, options.peer_python),
        tuple(dtypes),
        tuple(map(int, _names("--contexts", chosen, contexts))),
        _streams(options.streams) or (QUICK_STREAMS if quick else STREAMS),
        quick,
        options.peer_python,
        options.patience,
    )
    for model in plan.models:
        if not plan.cases(model):
            raise SystemExit(
                f"no measurement of {model.name} takes less than {options.patience:g} s: "
                "raise --patience"
            )
    return plan


def _systems(words: str, peer_python: str) -> tuple[str, ...]:
    names = _names("--systems", words or ",".join(DEFAULT_SYSTEMS), SYSTEMS)
    peers = [name for name in names if name in PEER_SYSTEMS]
    if words and peers and not peer_python:
        raise SystemExit(f"--systems {','.join(peers)} needs --peer-python")
    return tuple(name for name in SYSTEMS if name in names and (peer_python or name not in peers))


def _names(option: str, words: str, known: Collection[str]) -> list[str]:
    names = list(dict.fromkeys(words.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option} takes {', '.join(known)}; got {', '.join(unknown)}")
    return names


def _streams(words: str) -> tuple[int, ...]:
    if not words:
        return ()
    if not all(TOKENS.fullmatch(word) and 1 <= int(word) <= 256 for word in words.split(",")):
        raise SystemExit(
            f"--streams takes numbers from 1 to 256, separated by commas; got {words!r}"
        )
    return tuple(sorted({int(word) for word in words.split(",")}))
