"""The fused forward through torch.compile: the same answers, and six graphs, all compiled at
start."""

import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.model.compiled import (
    CompiledForward,
    compiles,
    missing_compiler,
)
from services.worker.model.fused import FusedForward
from services.worker.model.paged import PagedModel
from services.worker.model.probe import Probe
from tests.worker.worker_fixtures import (
    VOCABULARY,
    Feeder,
    clear_cases,
    reference,
)

CPU = torch.device("cpu")
GRAPHS = 6  # three pieces, each for one row and for many
LAYERS = 2
with_compiler = pytest.mark.skipif(
    bool(missing_compiler(CPU)),
    reason=f"{missing_compiler(CPU)} (g++ comes with the package g++, clang++ with clang)",
)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Clears PyTorch's graphs, which it keeps per function for the whole process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Recorder:
    """A backend that runs a graph as traced, and counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs = 0

    def __call__(self, graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        self.graphs += 1

        def run(*inputs: Any) -> Any:
            self.runs += 1
            return graph.forward(*inputs)

        return run


def model_of(name: str) -> PagedModel:
    return PagedModel(deepcopy(reference(name)), CPU)


def compiled(name: str, backend: Any) -> tuple[PagedModel, FusedForward]:
    """A model with a compiled forward, and the forward it had before."""
    model = model_of(name)
    fused = model._fused
    assert isinstance(fused, FusedForward)
    model.compile_forward(backend)
    assert model.forward_name == "fused forward, compiled"
    assert isinstance(model._fused, CompiledForward)
    return model, fused


def agree(model: PagedModel, fused: FusedForward) -> None:
    """Compares the forwards for every case of numbers of tokens and rows."""
    for count in (1, 2, 5, 64):
        generator = torch.Generator().manual_seed(count)
        ids = torch.randint(VOCABULARY, (count,), generator=generator)
        positions = torch.arange(count)
        for rows in (None, [], [count - 1], list(range(count))):
            asked = None if rows is None else torch.tensor(rows, dtype=torch.long)
            ours = model.forward(ids, positions, Probe(), asked)
            with torch.inference_mode():
                own = fused(ids, positions, Probe(), asked)
            torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_six_graphs_are_made_at_start_and_none_later(name: str):
    recorder = Recorder()
    model, fused = compiled(name, recorder)
    assert recorder.graphs == GRAPHS
    agree(model, fused)
    assert recorder.graphs == GRAPHS


@pytest.mark.slow
@with_compiler
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_compiled_forward_equals_eager(name: str):
    agree(*compiled(name, "inductor"))


@pytest.mark.slow
def test_every_engine_step_runs_compiled():
    """Prefills and decodes with one row and several, on a separate thread like a worker's."""
    recorder = Recorder()
    model, _ = compiled("llama", recorder)
    engine = Engine(model, EngineConfig(model="", kv_tokens=2048, host_gib=0))
    cases = clear_cases("llama", (3, 20, 40), 8)
    feeder = Feeder(engine)
    for request_id, (tokens, _) in cases.items():
        feeder.add(request_id, tokens, 8)
    recorder.runs, steps = 0, 0

    def serve() -> None:
        nonlocal steps
        torch.set_num_threads(torch.get_num_threads())
        while feeder.step():
            steps += 1

    thread = Thread(target=serve)
    thread.start()
    thread.join()
    assert feeder.output == {request_id: answer for request_id, (_, answer) in cases.items()}
    assert recorder.graphs == GRAPHS
    assert recorder.runs == steps * (LAYERS + 1)


def test_rows_without_a_graph_run_eagerly():
    """No logits are requested: no graph has zero rows."""
    recorder = Recorder()
    model, _ = compiled("llama", recorder)
    recorder.runs = 0
    no_rows = torch.tensor([], dtype=torch.long)
    logits = model.forward(torch.ones(4, dtype=torch.long), torch.arange(4), Probe(), no_rows)
    assert logits.shape == (0, VOCABULARY)
    assert (recorder.graphs, recorder.runs) == (GRAPHS, LAYERS)  # but for the last piece


def broken(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
    raise RuntimeError("no such instruction")


def wrong(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
    """A backend that changes the last hidden number."""

    def run(*inputs: Any) -> Any:
        (*others, last) = graph.forward(*inputs)
        return (*others, 1.1 * last + torch.arange(last.shape[-1]))

    return run


def breaks_alone(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """A backend that cannot compile a single row."""
    if any(isinstance(x, Tensor) and x.shape[0] == 1 for x in inputs):
        raise RuntimeError("no such instruction")
    return graph.forward


@pytest.mark.parametrize(
    ("backend", "reported"),
    [
        (broken, "it fails: .*no such instruction"),
        (wrong, "its logits differ by .*%"),
        (breaks_alone, "it fails: .*no such instruction"),
    ],
)
def test_failing_or_wrong_compiler_is_not_used(backend: Any, reported: str, caplog):
    model = model_of("llama")
    fused = model._fused
    model.compile_forward(backend)
    assert model._fused is fused
    assert model.forward_name == "fused forward"
    [record] = [r for r in caplog.records if r.name.startswith("services.")]
    assert record.levelname == "WARNING"
    expect = f"the compiled forward is not used: {reported}"
    assert re.match(expect, record.getMessage())


def test_model_without_fused_forward_is_not_compiled(caplog):
    model = model_of("gpt2")
    model.compile_forward(broken)
    assert model.forward_name == "transformers' forward (GPT2LMHeadModel has another layout)"
    assert [r.getMessage() for r in caplog.records if r.name.startswith("services.")] == [
        f"nothing is compiled, because {model.forward_name} is used"
    ]


def test_compile_on_without_a_compiler_is_refused_before_loading(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    message = r"compile is on, but there is no C\+\+ compiler /no/such/compiler: .* to auto"
    with pytest.raises(ValueError, match=message):
        compiles("on", CPU)
    with pytest.raises(ValueError, match=message):
        Engine.load(EngineConfig(model=str(tmp_path / "none"), device="cpu", compile="on"))
    for asked in ("auto", "off"):
        assert not compiles(asked, CPU)


def test_auto_compiles_on_gpus_with_triton(monkeypatch):
    gpu = torch.device("cuda")
    assert not compiles("auto", CPU)
    assert compiles("on", CPU) and compiles("on", gpu)
    assert not compiles("off", gpu)
    for found in (object(), None):
        monkeypatch.setattr("services.worker.model.compiled.find_spec", lambda _, f=found: f)
        assert compiles("auto", gpu) == bool(found)
    with pytest.raises(ValueError, match="Triton is not installed"):
        compiles("on", gpu)
