"""The GPU benchmark's decode steps, their flow: on the CPU, with a tape for a graph."""

from copy import deepcopy
from math import inf

import pytest
import torch

from benchmarks.gpu import steps as gpu_steps
from benchmarks.harness.report import figure
from services.worker.engine import assembly
from services.worker.engine.graphs import decode_graphs
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.model import paged
from services.worker.model.paged import PagedModel
from tests.worker.engine.tape_recorder import TapeRecorder
from tests.worker.engine.test_graphs import model


@pytest.mark.slow
def test_steps_are_timed_eager_and_graphed(monkeypatch):
    recorder, timed = TapeRecorder(), []

    def times_s(work, repeats, inner):
        timed.append(work())
        return figure([0.25 if len(timed) <= 2 else 0.125] * repeats)

    def recorder_for(config, device):
        return recorder if config.cuda_graphs == "on" else None

    monkeypatch.setattr(gpu_steps, "ROWS", (1, 2))
    monkeypatch.setattr(gpu_steps, "BLOCKS", 64)
    monkeypatch.setattr(gpu_steps, "CONTEXT_TOKENS", 20)
    monkeypatch.setattr(gpu_steps, "times_s", times_s)
    monkeypatch.setattr(gpu_steps, "make_model", lambda _: small())
    monkeypatch.setattr(assembly, "recorder_for", recorder_for)
    monkeypatch.setattr(paged, "layer_ops_for", lambda *_: TorchLayerOps())
    monkeypatch.setattr(decode_graphs, "RECORD_S", inf)
    lines = list(gpu_steps.step_lines(quick=True, repeats=3))
    assert [line.name for line in lines] == [
        f"decode step of {rows} rows, qwen3-0.6b, {what}"
        for rows in (1, 2)
        for what in ("eager", "graphed", "speed of graphed to eager")
    ]
    assert [line.figure.median for line in lines] == 2 * [0.25, 0.125, 2.0]
    assert recorder.played == 2 + 2, "each size is checked once, and timed once"
    for eager, graphed in zip(timed[:2], timed[2:], strict=True):
        assert torch.equal(eager, graphed)


def small() -> PagedModel:
    return PagedModel(deepcopy(model("one layer")), torch.device("cpu"))
