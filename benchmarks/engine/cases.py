"""The cases: models, contexts, streams; their estimated durations, and which are omitted."""

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from services.worker.config import DtypeName

LONE = ("engine", "vllm")  # bare loops, whose prefill is measured separately
SYSTEMS = ("engine", "grpc", "http", "transformers", "vllm", "vllm_http")
DEFAULT_SYSTEMS = SYSTEMS[:-1]  # two of vLLM's processes hold the weights twice
PEER_SYSTEMS = ("vllm", "vllm_http")  # need --peer-python
DTYPES: Mapping[str, DtypeName] = {"fp32": "float32", "bf16": "bfloat16"}
CONTEXTS = {160: (32, 256), 1_500: (1_500, 64)}  # prompt and output tokens
STREAMS = (1, 8, 32, 64)
QUICK_STREAMS = (1, 8)
QUICK_OUTPUT_TOKENS = 32
QUICK_REPEATS = 2
BLOCK_TOKENS = 32  # the smallest block of vLLM's CPU kernels; a multiple of ours
ROOM = 1.5  # KV above what a case holds at its end, so that no request waits for memory
LEAST_KV_TOKENS = 8_192
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
    """Approximate seconds on two cores, only for the estimate."""

    prompt_token_s: float
    step_s: float
    row_s: float  # of a step
    context_token_s: float  # of a step


@dataclass(frozen=True)
class Model:
    """`reach`: the target of engine over vLLM. `threads` for systems that do not choose; 0:
    PyTorch's default."""

    name: str
    output_tokens: int  # at most
    repeats: int
    starts: int
    reach: float
    threads: int
    costs: Costs


MODELS = {
    "demo": Model("demo", 256, 5, 5, 1.25, 1, Costs(1e-4, 4e-3, 1e-4, 8e-7)),
    "qwen3-0.6b": Model("qwen3-0.6b", 16, 3, 1, 1.0, 0, Costs(0.012, 0.15, 8e-3, 2e-6)),
}


@dataclass(frozen=True)
class Case:
    """This many equal requests at once. `context` is a key of CONTEXTS."""

    context: int
    streams: int
    prompt_tokens: int
    output_tokens: int

    @property
    def length_tokens(self) -> int:
        """Length of one request at its end, in whole blocks."""
        return BLOCK_TOKENS * ceil((self.prompt_tokens + self.output_tokens) / BLOCK_TOKENS)

    @property
    def kv_tokens(self) -> int:
        return self.streams * self.length_tokens


@dataclass(frozen=True)
class RunPlan:
    """What one run measures. `systems` in the order of SYSTEMS, without vLLM's if `peer_python` is
    empty. Measurements estimated above `patience_s` are omitted."""

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
        return [
            case
            for case in self._every(model)
            if any(self.has_time(model, case, system) for system in self.systems)
        ]

    def _every(self, model: Model) -> list[Case]:
        most = min(model.output_tokens, QUICK_OUTPUT_TOKENS) if self.quick else model.output_tokens
        return [
            Case(context, streams, CONTEXTS[context][0], min(CONTEXTS[context][1], most))
            for context in self.contexts
            for streams in self.streams
        ]

    def has_time(self, model: Model, case: Case, system: str) -> bool:
        return takes_s(model, case, system) <= self.patience_s

    def left_out(self) -> list[str]:
        """One line per case with omitted systems."""
        lines = []
        for model in self.models:
            for case in self._every(model):
                late = [s for s in self.systems if not self.has_time(model, case, s)]
                omitted = "all systems" if len(late) == len(self.systems) else ", ".join(late)
                if late:
                    where = f"{model.name}, context {case.context}, {case.streams} streams"
                    lines.append(f"{where}: {omitted}")
        return lines


def kv_tokens(cases: list[Case]) -> int:
    """KV with room for all requests, in whole blocks."""
    most = max(case.kv_tokens for case in cases)
    return BLOCK_TOKENS * ceil(max(ROOM * most, LEAST_KV_TOKENS) / BLOCK_TOKENS)


def takes_s(model: Model, case: Case, system: str) -> float:
    """Approximate duration of one measurement. transformers attends over all requests' KV for every
    row, and slows down with their number (1.6 times ours at 8 streams of 160, 4 times at 64)."""
    costs, streams = model.costs, case.streams
    mean_tokens = case.prompt_tokens + case.output_tokens / 2
    step_s = costs.step_s + streams * (costs.row_s + mean_tokens * costs.context_token_s)
    prefill_s = streams * case.prompt_tokens * costs.prompt_token_s
    slower = 1.5 + streams * mean_tokens / 4_000 if system == "transformers" else 1.0
    return slower * (prefill_s + case.output_tokens * step_s)


def run_takes_s(asked: RunPlan) -> float:
    """Approximate duration of the run."""
    total_s = 0.0
    for model in asked.models:
        by_case = sum(
            takes_s(model, case, system) * (1 if system not in LONE else 1.5)
            for case in asked.cases(model)
            for system in asked.systems
            if asked.has_time(model, case, system)
        )
        starts_s = sum(START_S[system] for system in asked.systems)
        starts_s += (asked.starts(model) - 1) * START_S["grpc"]
        total_s += len(asked.dtypes) * (starts_s + asked.repeats(model) * by_case)
    return total_s


def asked_of(given: Namespace) -> RunPlan:
    """Raises SystemExit with a sentence for anything that cannot be measured."""
    quick = bool(given.quick)
    small = quick or given.profile
    models = _named("--models", given.models or ("demo" if small else ",".join(MODELS)), MODELS)
    dtypes = _named("--dtypes", given.dtypes or ",".join(DTYPES), DTYPES)
    default_contexts = "160" if small else ",".join(map(str, CONTEXTS))
    named = {str(context): (context, *of) for context, of in CONTEXTS.items()}
    contexts = _named("--contexts", given.contexts or default_contexts, named)
    if given.patience <= 0:
        raise SystemExit(f"--patience takes seconds above 0, got {given.patience:g}")
    asked = RunPlan(
        tuple(MODELS[name] for name in models),
        _systems(given.systems, given.peer_python),
        tuple(dtypes),
        tuple(map(int, contexts)),
        _streams(given.streams) or (QUICK_STREAMS if quick else STREAMS),
        quick,
        given.peer_python,
        given.patience,
    )
    for model in asked.models:
        if not asked.cases(model):
            raise SystemExit(
                f"no measurement of {model.name} takes less than {given.patience:g} s: "
                "raise --patience"
            )
    return asked


def _systems(words: str, peer_python: str) -> tuple[str, ...]:
    named = _named("--systems", words or ",".join(DEFAULT_SYSTEMS), dict.fromkeys(SYSTEMS))
    peers = [name for name in named if name in PEER_SYSTEMS]
    if words and peers and not peer_python:
        raise SystemExit(f"--systems {','.join(peers)} needs --peer-python")
    return tuple(name for name in SYSTEMS if name in named and (peer_python or name not in peers))


def _named(option: str, words: str, known: Mapping[str, object]) -> list[str]:
    names = list(dict.fromkeys(words.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"{option} knows {', '.join(known)}, not {', '.join(unknown)}")
    return names


def _streams(words: str) -> tuple[int, ...]:
    if not words:
        return ()
    if not all(TOKENS.fullmatch(word) and 1 <= int(word) <= 256 for word in words.split(",")):
        raise SystemExit(f"--streams takes numbers from 1 to 256, by commas, got {words!r}")
    return tuple(sorted({int(word) for word in words.split(",")}))
