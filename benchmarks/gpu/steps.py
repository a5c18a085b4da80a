"""Times decode steps of a model with random weights, eager and as CUDA graphs."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.engine.shapes import SHAPES
from benchmarks.gpu.timing import Measurement, rates, times_s
from benchmarks.harness.report import Figure
from services.worker.config import EngineConfig
from services.worker.engine.graphs.check import RandomRows
from services.worker.engine.step import Engine
from services.worker.model.paged import PagedModel
from services.worker.requests.types.batch import StepBatch

SHAPE = "qwen3-0.6b"
ROWS = (1, 8, 32, 128)
CONTEXT_TOKENS = 1_024  # maximum; contexts are uniformly distributed
BLOCKS = 8_192


def make_model(quick: bool) -> PagedModel:
    """Returns the model in bfloat16; with a quarter of its layers if `quick`."""
    shape = SHAPES[SHAPE]
    if quick:
        shape = {**shape, "num_hidden_layers": shape["num_hidden_layers"] // 4}
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.bfloat16)
    return PagedModel(module, torch.device("cuda", torch.cuda.current_device()))


def make_engine(model: PagedModel, graphs: bool) -> Engine:
    config = EngineConfig(
        model="",
        host_gib=0,
        kv_tokens=BLOCKS * 16,
        max_running=max(ROWS),
        cuda_graphs="on" if graphs else "off",
    )
    return Engine(model, config)


def step_s(engine: Engine, batch: StepBatch, repeats: int) -> Figure:
    """Times one step with greedy sampling. The host reads the tokens after each step, as an engine
    does, so that the time includes launches for which the device waits."""

    def step() -> Tensor:
        tokens = engine.run(batch).argmax(-1)
        tokens.tolist()
        return tokens

    return times_s(step, repeats, inner=5)


def step_lines(quick: bool, repeats: int) -> Iterator[Measurement]:
    """Yields the speed of graphs relative to eager steps; without a target."""
    model = make_model(quick)
    rows = RandomRows(BLOCKS, 16, CONTEXT_TOKENS, model.vocab_size)
    batches = [rows.batch(n) for n in (ROWS[:2] if quick else ROWS)]
    measured = {}
    for graphs in (False, True):
        engine = make_engine(model, graphs)
        measured[graphs] = [step_s(engine, batch, repeats) for batch in batches]
        del engine
        torch.cuda.empty_cache()
    for batch, eager, graphed in zip(batches, measured[False], measured[True], strict=True):
        name = f"decode step of {len(batch.decodes)} rows, {SHAPE}"
        yield Measurement(f"{name}, eager", eager, "s")
        yield Measurement(f"{name}, graphed", graphed, "s")
        speed = rates(eager.median, graphed)
        yield Measurement(f"{name}, speed of graphed to eager", speed)
