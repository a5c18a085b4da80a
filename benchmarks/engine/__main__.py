"""Tokens per second of the engine, of the system around it, and of peers.

    python -m benchmarks.engine [--peer-python PYTHON] [--json FILE] [--quick] [--profile]
        [--streams 1,8,32,64] [--models demo,padded,qwen3-0.6b] [--contexts 160,1500]
        [--dtypes fp32,bf16] [--systems engine,grpc,http,transformers,vllm,vllm_http]
        [--patience S]

One run on one machine: greedy, end of sequence ignored, all streams at once. Systems are the bare
engine loop (`engine_tok_s`), the whole system through gRPC (`grpc_tok_s`) and through HTTP with
server-sent events (`http_tok_s`), and transformers' continuous batching (`transformers_tok_s`). If
`--peer-python` names a Python with vLLM, vLLM's own loop is measured too (`vllm_tok_s`:
`LLM.generate` without a tokenizer, as the engine loop has no server). `--systems vllm_http` adds
vLLM's server (`vllm_http_tok_s`), which holds another copy of the weights.

All systems are loaded for one model and dtype at a time. Bare loops run in separate processes. Each
system selects its number of threads (transformers: the engine's, for a model of this size).
Measurements alternate, in reverse order in every other round, so that a machine that slows down
slows all of them. No prompt occurs twice, so that prefix caches do not help. Results are medians of
5 rounds (`--quick`: 2 rounds of few and short answers). A peer that cannot run is reported with the
reason.

Contexts: 160 is the mean context of 32 prompt + 256 output tokens; 1500 is 1,500 + 64. Models: demo
(models/demo); the same padded with zeros to hidden 1,024 and MLP 2,048 (models/padded.py), with at
most 128 tokens an answer; and Qwen3-0.6B's shape with random weights, which is slow on two cores:
its answers have at most 16 tokens and it runs 3 rounds. The estimated duration is printed first.
Measurements that would take a system longer than `--patience` seconds (90) are omitted and listed.

`prefill_tok_s`: prompt tokens per second of answers of one token. `decode_tok_s`: tokens after the
first divided by the additional time. Both for engine and vllm. `cold_start_s`: from the start of
`foretoken serve` (of vLLM's process) until it is ready. Keys are dtype, model, streams and context.

`--profile` instead prints the time of a decode step by the engine's phases and by PyTorch's calls,
at the largest number of streams, by default of the demo model at 160.
"""

import asyncio
import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from benchmarks.engine.cases import (
    BARE_LOOPS,
    SYSTEMS,
    Case,
    Model,
    RunPlan,
    estimated_run_s,
    kv_tokens,
    make_run_plan,
)
from benchmarks.engine.figures import decode_tok_s, key_of, show_tables, targets
from benchmarks.engine.peers import INSTALL_VLLM
from benchmarks.engine.shapes import folder_of
from benchmarks.engine.step_profile import Profile, profile_step
from benchmarks.engine.systems import LoadedSystems, SystemSettings, cold_starts_s, load_systems
from benchmarks.harness.report import Key, Measurements, alternating, nested, parser, show, write
from benchmarks.harness.throughput import make_prompts
from services.worker.compiled_code import set_numba_cache_folder

PATIENCE_S = 90.0
WARM_UP_STREAMS, WARM_UP_TOKENS = 8, 8


def main() -> None:
    set_numba_cache_folder()
    options = _options()
    plan = make_run_plan(options)
    if plan.peer_python and not which(plan.peer_python):
        raise SystemExit(f"--peer-python: there is no program {plan.peer_python}")
    if not options.profile:
        _log(f"about {estimated_run_s(plan) / 60:.0f} minutes")
        for line in plan.omitted():
            _log(f"omitted because of --patience {plan.patience_s:g}: {line}")
    with TemporaryDirectory(prefix="foretoken-models-") as temporary:
        folders = {m.name: folder_of(m.name, Path(temporary)) for m in plan.models}
        if options.profile:
            _profile(options, plan, folders)
        else:
            _measure(options, plan, folders)


def _measure(options: Namespace, plan: RunPlan, folders: dict[str, str]) -> None:
    measured, missing = Measurements(), dict[Key, str]()
    for model in plan.models:
        for dtype in plan.dtypes:
            _log(f"{model.name} {dtype}: starting all systems")
            run = _Run(plan, model, dtype, folders[model.name], measured)
            for name, reason in asyncio.run(run.measure()).items():
                missing[name, dtype, model.name] = reason
    show_tables(measured, plan)
    for (name, dtype, model_name), reason in missing.items():
        print(f"{model_name} {dtype}: {name} is not available: {reason}")
    for line in targets(measured, plan):
        print(line)
    if not plan.peer_python:
        print(INSTALL_VLLM)
    extra = {"not_available": nested(missing), "repeats": measured.repeats()}
    write(options.json, measured.medians() | extra)


class _Run:
    """The measurements of one model and dtype."""

    seeds: Iterator[int] = count()  # of prompts: none occurs twice in a process

    def __init__(
        self, plan: RunPlan, model: Model, dtype: str, folder: str, measured: Measurements
    ):
        self._plan, self._model, self._dtype, self._measured = plan, model, dtype, measured
        cases = plan.cases(model)
        self._system = SystemSettings(
            folder,
            dtype,
            kv_tokens(cases),
            max(case.max_tokens for case in cases),
            max(case.streams for case in cases),
            model.threads,
            plan.peer_python,
            plan.systems,
        )

    async def measure(self) -> dict[str, str]:
        """Adds all measurements; returns the reasons of missing systems by name."""
        for start_s in cold_starts_s(self._system, self._plan.starts(self._model) - 1):
            self._add_cold_start("foretoken", start_s)
        async with load_systems(self._system) as loaded:
            for name, start_s in loaded.cold_start_s.items():
                self._add_cold_start(name, start_s)
            for name in list(loaded.throughputs):  # warm-up: lazy imports, first page faults
                streams = min(WARM_UP_STREAMS, self._system.streams)
                prompts = make_prompts(streams, 32, next(self.seeds))
                await loaded.measure(name, prompts, WARM_UP_TOKENS)
            rounds = self._plan.repeats(self._model)
            for number, names in alternating(self._plan.systems, rounds):
                _log(f"{self._model.name} {self._dtype}: round {number + 1} of {rounds}")
                for case in self._plan.cases(self._model):
                    in_time = self._plan.measured_systems(self._model, case)
                    for name in filter(in_time.__contains__, names):
                        await self._measure_case(loaded, name, case)
        return loaded.missing

    async def _measure_case(self, loaded: LoadedSystems, name: str, case: Case) -> None:
        async def rate(output_tokens: int) -> float | None:
            prompts = make_prompts(case.streams, case.prompt_tokens, next(self.seeds))
            return await loaded.measure(name, prompts, output_tokens)

        whole = await rate(case.output_tokens)
        if whole is None:
            return
        self._add((f"{name}_tok_s",), case, whole)
        first = await rate(1) if name in BARE_LOOPS else None
        if first is None:
            return
        prefill = first * case.prompt_tokens
        self._add(("prefill_tok_s", name), case, prefill)
        decode = decode_tok_s(case, whole, prefill)
        if decode is not None:
            self._add(("decode_tok_s", name), case, decode)

    def _add(self, figure: Key, case: Case, value: float) -> None:
        self._measured.add(key_of(figure, self._dtype, self._model, case), value)

    def _add_cold_start(self, system: str, start_s: float) -> None:
        self._measured.add(("cold_start_s", system, self._dtype, self._model.name), start_s)


def _profile(options: Namespace, plan: RunPlan, folders: dict[str, str]) -> None:
    phases_ms: dict[Key, object] = {}
    for model in plan.models:
        for dtype in plan.dtypes:
            for context in plan.contexts:
                cases = [case for case in plan.cases(model) if case.context == context]
                if cases:
                    profile = profile_step(folders[model.name], dtype, cases[-1])
                    _show_profile(f"{model.name} {dtype}", profile)
                    key = (dtype, model.name, str(profile.rows), str(context))
                    phases_ms[key] = dict(profile.phases_ms)
    write(options.json, {"profile_ms": nested(phases_ms)})


def _show_profile(title: str, profile: Profile) -> None:
    total_ms = sum(profile.phases_ms.values())
    print(
        f"{title}: a decode step of {profile.rows} rows with {profile.context_tokens:.0f} tokens "
        f"each and {profile.threads} PyTorch threads, medians of {profile.steps} steps"
    )
    rows = [[name, f"{ms:.2f}", f"{ms / total_ms:.0%}"] for name, ms in profile.phases_ms.items()]
    rows += [[phase, "not in this engine", ""] for phase in profile.missing]
    show("", ["phase", "ms", "share"], [*rows, ["all", f"{total_ms:.2f}", ""]])
    print(profile.calls)


def _options() -> Namespace:
    options = parser(__doc__)
    add = options.add_argument
    add("--peer-python", default="", help="a Python with vLLM for the CPU")
    add("--profile", action="store_true", help="profile one decode step instead")
    add("--streams", default="", help="default: 1,8,32,64; 1,8 with --quick")
    add("--models", default="", help="default: demo,padded,qwen3-0.6b; demo with --quick")
    add("--contexts", default="", help="default: 160,1500; 160 with --quick")
    add("--dtypes", default="", help="default: fp32,bf16")
    default = "all but vllm_http; vLLM needs --peer-python"
    add("--systems", default="", help=f"of {', '.join(SYSTEMS)}; default: {default}")
    add("--patience", type=float, default=PATIENCE_S, help="maximum seconds of one measurement")
    return options.parse_args()


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
