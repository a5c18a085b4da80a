"""The fused forward through `torch.compile`: the code between two attentions becomes one or a few
kernels.

Attention is not compiled: it is called between the compiled pieces, so that it needs no custom
operator. All layers share one piece, so that the compile time does not grow with the model. There
are three pieces (before the first attention, between two, after the last), each for one row and for
a dynamic number of rows. The check at start creates all six graphs. Nothing is compiled later:
inputs that fit no graph run eagerly.
"""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from shutil import which
from typing import Any, Literal

import torch
from torch import Tensor

from services.worker.compiled_code import cache_folder
from services.worker.kernels.interface import AttentionStep
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.model.fused import FusedForward, Layer

CompileName = Literal["auto", "on", "off"]
Backend = str | Callable[..., Any]

INDUCTOR = "inductor"
OPS = TorchLayerOps()  # the only ops that a compiler can trace
NO_RECOMPILE = "eager_on_recompile"  # a step never waits for a compiler


def compiles(asked: CompileName, device: torch.device) -> bool:
    """Whether the forward is compiled; `auto` compiles only on GPUs. A CPU spends its time in GEMMs
    and attention, which are not compiled, and the compiler would take longer than the rest of the
    start. Raises ValueError, with a sentence that says what to do, if compilation is `on` and a
    compiler is missing."""
    missing = missing_compiler(device)
    if asked == "on" and missing:
        raise ValueError(f"compile is on, but {missing}; or set compile to auto")
    return asked == "on" or (asked == "auto" and device.type == "cuda" and not missing)


def missing_compiler(device: torch.device) -> str:
    """What PyTorch's compiler needs for this device and does not find; empty if nothing is
    missing."""
    if device.type == "cuda":
        return "" if find_spec("triton") else "Triton is not installed: install the package triton"
    command = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if which(command):
        return ""
    return f"there is no C++ compiler {command}: install one, or set CXX to another"


class CompiledForward:
    """The compiled FusedForward, with which it shares weights. `prepare` compiles; other calls
    never do."""

    def __init__(self, fused: FusedForward, backend: Backend = INDUCTOR):
        # Inductor's own default is a temporary folder.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache_folder("inductor"))
        self._fused = self.eager = fused
        self._project_first = torch.compile(_project_first, backend=backend, fullgraph=True)
        self._finish_and_project = torch.compile(
            _finish_and_project, backend=backend, fullgraph=True
        )
        self._finish_last = torch.compile(_finish_last, backend=backend, fullgraph=True)

    def __call__(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """Logits [rows, vocabulary] of the packed batch; of all its tokens if `rows` is None."""
        with torch.compiler.set_stance(NO_RECOMPILE):
            return self._run(tokens, positions, step, rows)

    def prepare(self, tokens: Tensor, positions: Tensor, step: AttentionStep) -> Tensor:
        """Logits of all tokens. Compiles for exactly one token, or for any number from two on."""
        return self._run(tokens, positions, step, None, dynamic=len(tokens) > 1)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        step: AttentionStep,
        rows: Tensor | None,
        dynamic: bool = False,
    ) -> Tensor:
        mark = _mark_dynamic_rows if dynamic else _unchanged
        fused, layers = self._fused, self._fused.layers
        # Outside the graph, so that the rotations do not depend on how they are computed.
        hidden, cos, sin = fused.embed(tokens, positions)
        q, k, v = self._project_first(layers[0], *mark(hidden, cos, sin))
        for layer, after in pairwise(layers):
            attended = _attended(step, layer, q, k, v)
            q, k, v = self._finish_and_project(layer, after, *mark(hidden, attended, cos, sin))
        attended = _attended(step, layers[-1], q, k, v)
        if rows is not None:
            hidden, attended = hidden.index_select(0, rows), attended.index_select(0, rows)
        logits: Tensor = self._finish_last(fused, *mark(hidden, attended))
        return logits


def _attended(step: AttentionStep, layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[Σ tokens, heads · head_dim], contiguous: another layout would need another graph."""
    return step.attend(layer.index, q, k, v, layer.options).flatten(1).contiguous()


def _project_first(
    layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return layer.project(OPS, hidden, cos, sin)


def _finish_and_project(
    layer: Layer, after: Layer, hidden: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    layer.finish(OPS, hidden, attended)
    return after.project(OPS, hidden, cos, sin)


def _finish_last(fused: FusedForward, hidden: Tensor, attended: Tensor) -> Tensor:
    fused.layers[-1].finish(OPS, hidden, attended)
    return fused.logits(OPS, hidden)


def _unchanged(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors


def _mark_dynamic_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Marks the row dimension as dynamic, so that the graph accepts any number of rows from two on.
    PyTorch raises an error if a graph does not."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensors
