"""Time to first token that the services add to the bare engine when idle.

    python -m benchmarks.serving [--json FILE] [--quick] [--structured]

One run on one machine with the demo model, fp32: the bare engine loop and the whole system through
gRPC alternate, prompt by prompt. `benchmarks.engine` measures throughput, and `benchmarks.policy`
the planning rounds. With `--structured`: JSON schemas beside plain text, `benchmarks.structured`.
"""

import asyncio
from argparse import Namespace

import torch

from benchmarks.engine.bare_engine import BareEngine
from benchmarks.harness.clients import GrpcClient
from benchmarks.harness.report import Measurements, parser, show, write
from benchmarks.harness.system import foretoken_system
from benchmarks.harness.throughput import make_prompts
from benchmarks.structured import run as run_structured
from foretoken.running.options import demo_model

KV_TOKENS = 65_536
PROMPT_TOKENS = 32
WARM_UP = 8  # prompts that do not count: lazy imports, first page faults


async def measure(options: Namespace) -> Measurements:
    count = WARM_UP + (10 if options.quick else 100)
    measured = Measurements()
    engine = BareEngine(demo_model(), KV_TOKENS, "float32")
    choices = ("--kv-tokens", str(KV_TOKENS), "--dtype", "float32")
    with foretoken_system(*choices) as system:
        client = GrpcClient(system.grpc)
        for number, prompt in enumerate(make_prompts(count, PROMPT_TOKENS, seed=0)):
            engine_s, grpc_s = engine.ttft_s(prompt), await client.ttft_s(prompt)
            if number >= WARM_UP:
                measured.add(("engine_ttft_ms",), engine_s * 1e3)
                measured.add(("grpc_ttft_ms",), grpc_s * 1e3)
        await client.close()
    return measured


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--structured", action="store_true", help="measure JSON schemas")
    arguments.add_argument("--peer-python", help="Python with vLLM, measured beside `--structured`")
    options = arguments.parse_args()
    if options.structured:
        run_structured(options)
        return
    torch.set_num_threads(1)  # the number that the worker selects for a model of this size
    measured = asyncio.run(measure(options))
    engine, grpc = measured.figure("engine_ttft_ms"), measured.figure("grpc_ttft_ms")
    added_ms = grpc.median - engine.median
    rows = [("bare engine", engine), ("through gRPC", grpc), ("added", f"{added_ms:.2f}")]
    show("Time to first token at idle, ms: median (lowest–highest)", ("", "ms"), rows)
    record = measured.medians() | {"added_ttft_ms": added_ms, "repeats": measured.repeats()}
    write(options.json, record)


if __name__ == "__main__":
    main()
