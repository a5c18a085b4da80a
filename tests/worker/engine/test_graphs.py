"""Recorded decode steps: their answers equal those of eager steps, and unusable ones are
omitted."""

import logging
from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from services.worker.config import EngineConfig
from services.worker.engine import assembly
from services.worker.engine.graphs import decode_graphs
from services.worker.engine.graphs.sizes import (
    graphs_wanted,
    next_larger_sizes,
    recorded_sizes,
    recording_order,
)
from services.worker.engine.step import Engine
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.model import paged
from services.worker.requests.types.prompt import SamplingParams
from tests.worker.engine.tape_recorder import TapeRecorder
from tests.worker.worker_fixtures import GROUPED, Feeder, make_engine, prompt_tokens

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
SIZES: dict[str, Any] = {**GROUPED, "hidden_size": 128}  # heads of 32, the smallest for Triton

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "one layer": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1})),
    "two layers": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=7)),
}


@cache
def model(name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    return MODELS[name]().eval()


def recorded_by(
    recorder: Any, monkeypatch: pytest.MonkeyPatch, limit_s: float = inf, **settings: Any
) -> Engine:
    """An engine on the CPU with decode steps recorded by `recorder`."""
    few = {"kernels": "triton", "block_tokens": 4, "max_running": 4, "kv_tokens": 256}
    with monkeypatch.context() as patched:
        patched.setattr(assembly, "recorder_for", lambda *_: recorder)
        patched.setattr(paged, "layer_ops_for", lambda *_: TorchLayerOps())  # a GPU's
        patched.setattr(decode_graphs, "RECORD_S", limit_s)
        return make_engine(model(settings.pop("model", "one layer")), **{**few, **settings})


def answers(engine: Engine, lengths: tuple[int, ...], new_tokens: int = 3) -> dict[str, list[int]]:
    """Answers to prompts that arrive one after another, so that batches of all sizes decode."""
    feeder = Feeder(engine)
    for number, length in enumerate(lengths):
        feeder.add(f"r{number}", prompt_tokens(number, length), new_tokens + number, ENDLESS)
        feeder.step()
    return dict(feeder.run())


# --- sizes and conditions


@pytest.mark.parametrize(
    ("max_rows", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (32, [1, 2, 4, 8, 16, 24, 32]),
        (168, [1, 2, 4, *range(8, 129, 8), 144, 160, 168]),
        (512, [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, 513, 32)]),
    ],
)
def test_graph_sizes_table(max_rows, sizes):
    assert recorded_sizes(max_rows) == sizes


def test_graphs_are_recorded_largest_first_then_coarse():
    assert recording_order([1, 2, 4, 8, 16, 24, 32, 40]) == [40, 32, 16, 8, 4, 2, 1, 24]
    assert recording_order([1]) == [1]


def test_batch_runs_at_the_next_larger_graph_size():
    assert next_larger_sizes([4, 2, 7], 7) == [None, 2, 2, 4, 4, 7, 7, 7]


@pytest.mark.parametrize(
    ("device", "kernels", "setting", "wanted"),
    [
        (CUDA, "auto", "auto", True),
        (CUDA, "triton", "on", True),
        (CUDA, "auto", "off", False),
        (CUDA, "torch", "auto", False),
        (CPU, "auto", "auto", False),
        (CPU, "triton", "auto", False),
        (CPU, "auto", "off", False),
        (CUDA, "torch", "on", "cuda_graphs on needs the Triton kernels, and kernels is torch"),
        (CPU, "triton", "on", "cuda_graphs on needs a CUDA device, and this worker runs on cpu"),
    ],
)
def test_graphs_are_used_where_configured_and_possible(device, kernels, setting, wanted):
    config = EngineConfig(kernels=kernels, cuda_graphs=setting)
    if isinstance(wanted, bool):
        assert graphs_wanted(config, device) is wanted
    else:
        with pytest.raises(ValueError, match=wanted):
            graphs_wanted(config, device)


def test_graphs_on_a_cpu_are_refused_before_weights_are_read():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        Engine.load(EngineConfig(model="/nowhere", device="cpu", cuda_graphs="on"))


# --- answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "two layers"},
        {"model": "a window", "fused_forward": "off"},
        {"model": "two layers", "kv_dtype": "int8"},
    ],
    ids=["fused", "a window, transformers' forward", "INT8"],
)
def test_recorded_steps_equal_eager_steps(settings, monkeypatch):
    """Batches of 1, 2, 3 (padded to 4) and 4 rows decode; prefills join and ended rows leave."""
    lengths = (3, 18, 7, 11)
    eager = make_engine(
        model(settings["model"]),
        **{k: v for k, v in settings.items() if k != "model"},
        kernels="torch", block_tokens=4,
    )  # fmt: skip
    recorder = TapeRecorder()
    engine = recorded_by(recorder, monkeypatch, **settings)
    assert recorder.recorded == recorder.played == 3  # of 1, 2 and 4 rows, each checked once
    assert answers(engine, lengths) == answers(eager, lengths)
    assert recorder.played > 3 + 4
    assert engine.can_compute()


@pytest.mark.slow
def test_graph_padding_stays_in_its_own_block(monkeypatch):
    engine = recorded_by(TapeRecorder(), monkeypatch)
    graphs = engine._graphs
    assert graphs is not None
    parts = graphs.parts
    layers = [layer.data for layer in parts.cache.layers]
    assert parts.pad_block == engine.state.pool.blocks == len(layers[0][0]) - 1
    assert not any(layer[:, :-1].any() for layer in layers), "the check changed the cache"
    for layer in layers:
        layer.fill_(torch.nan)
    feeder = Feeder(engine)
    for name in "abc":
        feeder.add(name, prompt_tokens(1, 3), 6, ENDLESS)
    feeder.run()
    assert not graphs.buffers.positions[3:].any(), "padding of the check's row reads its context"
    written = [~layer.isnan().flatten(2).all(-1).all(0) for layer in layers]
    assert all(bool(w[-1]) for w in written), "three rows are padded to four"
    assert int(written[0].sum()) == 1 + 3 * 2  # three rows of 3 + 6 − 1 tokens


def test_contexts_beyond_the_recorded_tables_run_eagerly(monkeypatch):
    monkeypatch.setattr(assembly, "ROW_BLOCKS_MAX", 3)
    recorder = TapeRecorder()
    engine = recorded_by(recorder, monkeypatch, max_running=1)
    feeder = Feeder(engine)
    feeder.add("r", prompt_tokens(1, 9), 8, ENDLESS)
    assert feeder.run() == answers_of_one(9, 8)
    assert recorder.played == 1 + 3  # tokens 10, 11 and 12 of three blocks of 4


def answers_of_one(length: int, new_tokens: int) -> dict[str, list[int]]:
    feeder = Feeder(make_engine(model("one layer"), kernels="torch"))
    feeder.add("r", prompt_tokens(1, length), new_tokens, ENDLESS)
    return dict(feeder.run())


# --- omitted recordings


class Faulty(TapeRecorder):
    """A recorder that fails, or records something else, from the nth recording on. Each recording
    takes memory."""

    def __init__(self, wrong: int = 99, broken: int = 99, each_bytes: int = 0):
        super().__init__()
        self.wrong, self.broken, self.each_bytes = wrong, broken, each_bytes
        self.engine: Engine | None = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        if self.recorded >= self.broken:
            raise RuntimeError("operation not permitted\n when stream is capturing")
        replay = super().record(work)
        if self.recorded <= self.wrong:
            return replay
        return lambda: None

    def used_bytes(self) -> int:
        return self.recorded * self.each_bytes


@pytest.mark.slow
def test_deviating_graph_size_is_omitted(monkeypatch, caplog):
    """The second and third replays do nothing, so that the logits of another batch remain."""
    recorder = Faulty(wrong=1)
    engine = recorded_by(recorder, monkeypatch)
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 2
    assert caplog.messages[0].startswith("decode steps of 2 rows run eagerly: its logits differ")
    played = recorder.played
    feeder = Feeder(engine)
    feeder.add("r", prompt_tokens(1, 9), 8, ENDLESS)
    assert feeder.run() == answers_of_one(9, 8)
    assert recorder.played == played + 7  # one row, as four


def test_engine_without_recordings_runs_eagerly(monkeypatch, caplog):
    engine = recorded_by(Faulty(broken=0), monkeypatch)
    assert caplog.messages == [
        "decode steps of 4 rows cannot be recorded: operation not permitted when stream is "
        "capturing",
        "no decode step runs as a CUDA graph",
    ]
    feeder = Feeder(engine)
    feeder.add("r", prompt_tokens(1, 9), 4, ENDLESS)
    assert feeder.run() == answers_of_one(9, 4)


def test_forward_that_waits_for_the_device_is_not_recorded(monkeypatch, caplog):
    forward = LlamaForCausalLM.forward

    def waiting(self: Any, input_ids: Any, **given: Any) -> Any:
        assert int(input_ids.max()) >= 0
        return forward(self, input_ids, **given)

    monkeypatch.setattr(LlamaForCausalLM, "forward", waiting)
    recorded_by(TapeRecorder(), monkeypatch, fused_forward="off")
    assert "the host waits for the device" in caplog.messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("bound", ["time", "memory"])
def test_recording_is_bounded_in_time_and_memory(bound, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    recorder = Faulty(each_bytes=3 << 20 if bound == "memory" else 0)
    engine = recorded_by(recorder, monkeypatch, limit_s=-1.0 if bound == "time" else inf)
    assert recorder.recorded == 1, "the largest size"
    assert "up to 4 rows run as CUDA graphs: 1 of 3 sizes, recorded in" in caplog.messages[-1]
    assert len(answers(engine, (3, 5))["r1"]) == 4
