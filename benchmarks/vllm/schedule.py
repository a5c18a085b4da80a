"""Time of `schedule()` inside vLLM, with its own scheduler and with foretoken's.

    PYTHON_WITH_VLLM -m benchmarks.vllm.schedule [--running 256] [--waiting 2000] [--steps 200]
        [--rounds 3] [--json FILE]

Runs with the Python of an environment that has vLLM and foretoken. Each round starts vLLM's engine
with the demo model once for each scheduler, in alternating order, adds `--running` + `--waiting`
requests that do not end, and times each call of `schedule()`: the time by which a step begins
later. foretoken's rounds run in a thread beside the steps and take the interpreter's lock from
both; `step_p50_ms` has what that costs a whole step.
"""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Measurements, alternating, show, write

SCHEDULERS = {"vllm": "", "foretoken.vllm": "foretoken.vllm.Scheduler"}
FIGURES = ("schedule_p50_ms", "schedule_p99_ms", "step_p50_ms")
PROMPT_TOKENS, BLOCK_TOKENS = 16, 32
WARM_UP_STEPS = 50  # prefills, and the first forecasts


def main() -> None:
    options = _options()
    if options.scheduler:
        print(json.dumps(measure(options)))
        return
    measured = Measurements()
    for number, names in alternating(list(SCHEDULERS), options.rounds):
        for name in names:
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            for figure, value in in_a_process(name, options).items():
                measured.add((name, figure), value)
    show(
        f"{options.running} running, {options.waiting} waiting",
        ["scheduler", *FIGURES],
        [[name, *(str(measured.figure(name, each)) for each in FIGURES)] for name in SCHEDULERS],
    )
    write(options.json, {**measured.medians(), "repeats": measured.repeats()})


def in_a_process(name: str, options: Namespace) -> dict[str, float]:
    sizes = ("running", "waiting", "steps")
    numbers = [word for size in sizes for word in (f"--{size}", str(getattr(options, size)))]
    command = [sys.executable, "-m", "benchmarks.vllm.schedule", "--scheduler", name, *numbers]
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is in this process
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    printed = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment
    ).stdout
    figures: dict[str, float] = json.loads(printed.splitlines()[-1])
    return figures


def measure(options: Namespace) -> dict[str, float]:
    """The figures of one scheduler, in this process."""
    import vllm

    from foretoken.running.options import demo_model

    count = options.running + options.waiting
    output = options.steps + WARM_UP_STEPS + 50  # tokens of a request: none ends while measured
    longest = PROMPT_TOKENS + output
    llm = vllm.LLM(
        model=demo_model(),
        dtype="float32",
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=options.running * -(-longest // BLOCK_TOKENS) + 8,
        max_num_seqs=options.running,
        max_model_len=longest,
        max_num_batched_tokens=8_192,
        enable_prefix_caching=False,
        scheduler_cls=SCHEDULERS[options.scheduler] or None,
    )
    engine = llm.llm_engine
    sampling = vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=output)
    for number in range(count):
        ids = [3 + (number * 7 + i) % 200 for i in range(PROMPT_TOKENS)]
        engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    scheduler: Any = engine.engine_core.engine_core.scheduler
    schedule, calls_ms = scheduler.schedule, list[float]()

    def timed(*args: Any, **kwargs: Any) -> Any:
        begun_s = time.perf_counter()
        scheduled = schedule(*args, **kwargs)
        calls_ms.append(1e3 * (time.perf_counter() - begun_s))
        return scheduled

    scheduler.schedule = timed
    steps_ms = []
    for _ in range(WARM_UP_STEPS + options.steps):
        begun_s = time.perf_counter()
        engine.step()
        steps_ms.append(1e3 * (time.perf_counter() - begun_s))
    full = len(scheduler.running) == options.running
    if not full:
        raise RuntimeError(f"{len(scheduler.running)} of {options.running} requests run")
    calls, steps = sorted(calls_ms[WARM_UP_STEPS:]), sorted(steps_ms[WARM_UP_STEPS:])
    at_p99 = int(0.99 * len(calls))
    return dict(
        zip(FIGURES, (calls[len(calls) // 2], calls[at_p99], steps[len(steps) // 2]), strict=True)
    )


def _options() -> Namespace:
    options = ArgumentParser(description=(__doc__ or "").split("\n")[0])
    options.add_argument("--running", type=int, default=256)
    options.add_argument("--waiting", type=int, default=2_000)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--json", type=Path, help="write the figures to this file")
    options.add_argument("--scheduler", choices=SCHEDULERS, help="measure one in this process")
    return options.parse_args()


if __name__ == "__main__":
    main()
