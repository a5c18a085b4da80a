"""What LoRA adapters cost: mixed batches of several adapters beside batches of the base model.

    python -m benchmarks.adapters [--json FILE] [--quick] [--models padded] [--dtypes fp32]
        [--streams 8,32] [--adapters 8] [--rank 8] [--rounds N]

One bare engine holds adapters of random weights in every linear map of the layers. In alternating
order it answers the same prompts with the base model, with all adapters (each stream the next one),
and with one adapter for all streams. Tokens per second of the clock and of CPU time, which other
work on the machine changes less: medians, and the ratio to the base model of the same round.
"""

import json
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.engine.cases import DTYPES
from benchmarks.engine.shapes import each_model, engine_options
from benchmarks.harness.report import Measurements, alternating, show, write
from benchmarks.harness.throughput import Prompts, make_prompts
from services.core import Grant, Plan
from services.worker.compiled_code import set_numba_cache_folder
from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.requests.types.prompt import Prompt, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
BASE, MIXED, SAME = "base", "mixed", "same"


def main() -> None:
    set_numba_cache_folder()
    options = _options()
    measured = Measurements()
    for model, folder, dtype in each_model(options):
        _measure(options, model, folder, dtype, measured)
    rows = [
        (
            *key,
            *(
                measured.figure(*key, name)
                for name in ("tok_s", "tok_cpu_s", "of_base", "of_base_cpu")
            ),
        )
        for key in dict.fromkeys(key[:-1] for key in measured.values)
    ]
    head = ("model", "dtype", "streams", "rows", "tok/s", "tok/CPU s", "of base", "of base, CPU")
    show("Adapters", head, rows, width=140)
    write(options.json, measured.medians() | {"repeats": measured.repeats()})


def _options() -> Namespace:
    options = engine_options(__doc__, "padded", "8,32")
    options.add_argument("--adapters", type=int, default=8)
    options.add_argument("--rank", type=int, default=8)
    return options.parse_args()


def _measure(
    options: Namespace, model: str, folder: str, dtype: str, measured: Measurements
) -> None:
    engine = Engine.load(
        EngineConfig(
            model=folder, dtype=DTYPES[dtype], kv_tokens=16_384,
            max_adapters=options.adapters, max_lora_rank=options.rank,
        )
    )  # fmt: skip
    names = [f"a{number}" for number in range(options.adapters)]
    with TemporaryDirectory(prefix="foretoken-adapters-") as temporary:
        for name in names:
            path = Path(temporary) / name
            write_random_adapter(path, engine.model.adapters.sizes, options.rank)
            engine.adapters.read(name, str(path))()
    chosen = {BASE: [""], MIXED: names, SAME: names[:1]}
    tokens = 16 if options.quick else OUTPUT_TOKENS
    for streams in (int(number) for number in options.streams.split(",")):
        # The first round warms up.
        for number, order in alternating(
            list(chosen), 1 + (1 if options.quick else options.rounds)
        ):
            prompts = make_prompts(streams, PROMPT_TOKENS, number)
            rates = {kind: _serve(engine, prompts, chosen[kind], tokens) for kind in order}
            for kind, (tok_s, tok_cpu_s) in rates.items() if number else ():
                key = model, dtype, str(streams), kind
                base_tok_s, base_tok_cpu_s = rates[BASE]
                measured.add((*key, "tok_s"), tok_s)
                measured.add((*key, "tok_cpu_s"), tok_cpu_s)
                measured.add((*key, "of_base"), tok_s / base_tok_s)
                measured.add((*key, "of_base_cpu"), tok_cpu_s / base_tok_cpu_s)


def write_random_adapter(folder: Path, sizes: Mapping[str, tuple[int, int]], rank: int) -> None:
    """Writes an adapter with weights in every linear map, too small to change a text much."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights: dict[str, Tensor] = {}
    for path, (inputs, outputs) in sizes.items():
        weights[f"base_model.model.{path}.lora_A.weight"] = 1e-3 * torch.randn(rank, inputs)
        weights[f"base_model.model.{path}.lora_B.weight"] = 1e-3 * torch.randn(outputs, rank)
    save_file(weights, folder / "adapter_model.safetensors")


def _serve(
    engine: Engine, prompts: Prompts, adapters: Sequence[str], output_tokens: int
) -> tuple[float, float]:
    """Answers all prompts at once. Returns tokens per second, and per second of CPU time."""
    engine.reset()
    names = [f"r{number}" for number in range(len(prompts))]
    grants = tuple(Grant(name, output_tokens) for name in names)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        adapter = adapters[number % len(adapters)]
        engine.add(
            Prompt(name, tuple(prompt), len(prompt), output_tokens, sampling, adapter=adapter), 0.0
        )
    engine.state.apply_plan(Plan(1, admit=grants), 0.0)
    tokens = 0
    while (result := engine.step()) is not None:
        tokens += len(result.tokens)
    elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return tokens / elapsed_s, tokens / cpu_s


if __name__ == "__main__":
    main()
