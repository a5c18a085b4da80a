"""Tokens per second of the engine, of the system around it, and of its peers.

    python -m benchmarks.engine [--peer-python PYTHON] [--json FILE] [--quick] [--profile]
        [--streams 1,8,32,64] [--models demo,qwen3-0.6b] [--contexts 160,1500]
        [--dtypes fp32,bf16] [--systems engine,grpc,http,transformers,vllm,vllm_http]
        [--patience S]

One run on one machine: greedy, end of sequence ignored, all streams at once. It measures the bare
engine loop (`engine_tok_s`), the whole system through gRPC (`grpc_tok_s`) and through HTTP with
server-sent events (`http_tok_s`), transformers' continuous batching (`transformers_tok_s`), and
vLLM's own loop (`vllm_tok_s`: `LLM.generate` without a tokenizer, as ours is without a server) if
`--peer-python` names a Python with vLLM. `--systems vllm_http` adds vLLM's server
(`vllm_http_tok_s`; another copy of the weights in memory). For one model and dtype at a time all
systems are loaded, bare loops in processes of their own, with the threads that each chooses
(transformers: the engine's, for so small a model). Measurements alternate, every other round in
reverse order, so that a machine that slows down slows all of them. No prompt occurs twice, so that
prefix caches do not help. Results are medians of 5 rounds (`--quick`: 2 rounds of few and short
answers). A peer that cannot run is reported with the reason.

Contexts: 160 is the mean context of 32 prompt + 256 output tokens; 1500 is 1,500 + 64. Models: demo
(models/demo) and Qwen3-0.6B's shape with random weights, created in a temporary folder, which is
slow on two cores: its answers have at most 16 tokens and it runs 3 rounds. The estimated duration
is printed first. Measurements that would take a system longer than `--patience` seconds (90) are
omitted and listed.

`prefill_tok_s`: prompt tokens per second of answers of one token. `decode_tok_s`: tokens after the
first divided by the additional time. Both for engine and vllm. `cold_start_s`: from the start of
`foretoken serve` (of vLLM's process) to ready. Keys are dtype, model, streams and context.

`--profile` measures none of this: it prints the time of a decode step by the engine's phases and by
PyTorch's calls, at the largest number of streams, by default of the demo model at 160.
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
    LONE,
    SYSTEMS,
    Case,
    Model,
    RunPlan,
    asked_of,
    kv_tokens,
    run_takes_s,
)
from benchmarks.engine.figures import (
    Key,
    Measurements,
    decode_tok_s,
    nested,
    path_of,
    reaches,
    tables,
)
from benchmarks.engine.peer import HOW_TO
from benchmarks.engine.prompts import prompts
from benchmarks.engine.shapes import folder_of
from benchmarks.engine.step_profile import Profile, profile_step
from benchmarks.engine.systems import Serve, Standing, standing, starts_s
from benchmarks.harness.report import parser, show, write
from services.worker.compiled_code import set_numba_cache_folder

PATIENCE_S = 90.0
WARM_STREAMS, WARM_TOKENS = 8, 8
Missing = dict[Key, str]  # the reason, by system, dtype and model


def main() -> None:
    set_numba_cache_folder()
    given = _given()
    asked = asked_of(given)
    if asked.peer_python and not which(asked.peer_python):
        raise SystemExit(f"--peer-python: there is no program {asked.peer_python}")
    if not given.profile:
        _say(f"about {run_takes_s(asked) / 60:.0f} minutes")
        for line in asked.left_out():
            _say(f"left out for --patience {asked.patience_s:g}: {line}")
    with TemporaryDirectory(prefix="foretoken-models-") as temporary:
        folders = {m.name: folder_of(m.name, Path(temporary)) for m in asked.models}
        if given.profile:
            _profile(given, asked, folders)
        else:
            _measure(given, asked, folders)


def _measure(given: Namespace, asked: RunPlan, folders: dict[str, str]) -> None:
    taken = Measurements()
    missing = asyncio.run(measure(asked, folders, taken))
    tables(taken, asked)
    for (name, dtype, model), why in missing.items():
        print(f"{model} {dtype}: {name} is not available: {why}")
    for line in reaches(taken, asked):
        print(line)
    if not asked.peer_python:
        print(HOW_TO)
    extra = {"not_available": nested(missing), "repeats": taken.repeats()}
    write(given.json, taken.medians() | extra)


async def measure(asked: RunPlan, folders: dict[str, str], taken: Measurements) -> Missing:
    """Fills `taken`; returns the missing systems and why."""
    missing: Missing = {}
    seeds = count()
    for model in asked.models:
        for dtype in asked.dtypes:
            serve = _serve(asked, model, dtype, folders[model.name])
            _say(f"{model.name} {dtype}: everybody starts")
            for start_s in starts_s(serve, asked.starts(model) - 1):
                taken.add(("cold_start_s", "foretoken", dtype, model.name), start_s)
            async with standing(serve) as found:
                for name, start_s in found.cold_start_s.items():
                    taken.add(("cold_start_s", name, dtype, model.name), start_s)
                await _warm(found, serve, seeds)
                await _rounds(asked, model, dtype, found, seeds, taken)
            missing |= {(name, dtype, model.name): why for name, why in found.missing.items()}
    return missing


async def _rounds(
    asked: RunPlan,
    model: Model,
    dtype: str,
    found: Standing,
    seeds: Iterator[int],
    taken: Measurements,
) -> None:
    """All systems in turn, case by case; every other round in reverse order."""
    for number in range(asked.repeats(model)):
        _say(f"{model.name} {dtype}: round {number + 1} of {asked.repeats(model)}")
        for case in asked.cases(model):
            for name in asked.systems[:: -1 if number % 2 else 1]:
                if asked.has_time(model, case, name):
                    await _take(found, name, model, dtype, case, seeds, taken)


def _serve(asked: RunPlan, model: Model, dtype: str, folder: str) -> Serve:
    cases = asked.cases(model)
    longest = max(case.length_tokens for case in cases)
    most = max(case.streams for case in cases)
    room = kv_tokens(cases)
    sizes = (room, longest, most, model.threads)
    return Serve(folder, dtype, *sizes, asked.peer_python, asked.systems)


async def _warm(found: Standing, serve: Serve, seeds: Iterator[int]) -> None:
    """Triggers lazy imports and first page faults."""
    for name in list(found.rates):
        some = prompts(min(WARM_STREAMS, serve.streams), 32, next(seeds))
        await found.measure(name, some, WARM_TOKENS)


async def _take(
    found: Standing,
    name: str,
    model: Model,
    dtype: str,
    case: Case,
    seeds: Iterator[int],
    taken: Measurements,
) -> None:
    """One measurement of one system."""

    async def rate(output_tokens: int) -> float | None:
        some = prompts(case.streams, case.prompt_tokens, next(seeds))
        return await found.measure(name, some, output_tokens)

    whole = await rate(case.output_tokens)
    if whole is not None:
        taken.add(path_of((f"{name}_tok_s",), dtype, model, case), whole)
    if name not in LONE or whole is None:
        return
    first = await rate(1)
    if first is None:
        return
    prefill = first * case.prompt_tokens
    taken.add(path_of(("prefill_tok_s", name), dtype, model, case), prefill)
    decode = decode_tok_s(case, whole, prefill)
    if decode is not None:
        taken.add(path_of(("decode_tok_s", name), dtype, model, case), decode)


def _profile(given: Namespace, asked: RunPlan, folders: dict[str, str]) -> None:
    found: dict[tuple[str, ...], object] = {}
    for model in asked.models:
        for dtype in asked.dtypes:
            for context in asked.contexts:
                cases = [case for case in asked.cases(model) if case.context == context]
                if cases:
                    profiled = profile_step(folders[model.name], dtype, cases[-1])
                    _show(f"{model.name} {dtype}", profiled)
                    key = (dtype, model.name, str(profiled.rows), str(context))
                    found[key] = dict(profiled.phases_ms)
    write(given.json, {"profile_ms": nested(found)})


def _show(title: str, found: Profile) -> None:
    total_ms = found.step_ms
    print(
        f"{title}: a decode step of {found.rows} rows over {found.context_tokens:.0f} tokens each "
        f"with {found.threads} of PyTorch's threads, medians of {found.steps} steps"
    )
    show(
        "",
        ["phase", "ms", "share"],
        [
            *(
                [phase, f"{ms:.2f}", f"{ms / total_ms:.0%}"]
                for phase, ms in found.phases_ms.items()
            ),
            *([phase, "this engine has none", ""] for phase in found.missing),
            ["all", f"{total_ms:.2f}", ""],
        ],
    )
    print(found.calls)


def _given() -> Namespace:
    taking = parser((__doc__ or "").splitlines()[0])
    taking.add_argument("--peer-python", default="", help="a Python that has vLLM for the CPU")
    taking.add_argument("--profile", action="store_true", help="of one decode step, instead")
    taking.add_argument("--streams", default="", help="by commas; else 1,8,32,64, quick 1,8")
    taking.add_argument("--models", default="", help="demo, qwen3-0.6b; else both, quick demo")
    taking.add_argument("--contexts", default="", help="160, 1500; else both, quick 160")
    taking.add_argument("--dtypes", default="", help="fp32, bf16; else both")
    default = "all but vllm_http, vLLM's where --peer-python is given"
    taking.add_argument("--systems", default="", help=f"{', '.join(SYSTEMS)}; else {default}")
    taking.add_argument(
        "--patience", type=float, default=PATIENCE_S, help="seconds that one measurement may take"
    )
    return taking.parse_args()


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
