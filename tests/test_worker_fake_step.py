"""A step that never waits for the device: run on tensors that have no data.

Whatever reads a value on the host raises there: `.item()`, `bool()`, `.tolist()`, an index by a
mask. A GPU would have stood still for it.
"""

from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from services.worker.kernels.interface import AttentionOptions
from services.worker.model import paged
from services.worker.model.paged import PagedModel
from services.worker.model.row_ops import TorchRowOps
from tests.worker_fixtures import MODELS, VOCABULARY, reference


class Blind:
    """Attention's shapes only: the kernels that a GPU runs are its own matter."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        return q + k.mean() + v.mean()


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_reads_nothing_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch):
    """With what a GPU's forward is made of: a CPU's rows are Numba's, which reads all there is."""
    monkeypatch.setattr(paged, "row_ops_for", lambda *_: TorchRowOps())
    model = PagedModel(deepcopy(reference(name)), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, positions = torch.zeros(5, dtype=torch.long), torch.arange(5)
        every = model.forward(tokens, positions, Blind(), None)
        some = model.forward(tokens, positions, Blind(), torch.tensor([0, 3]))
    assert every.shape == (5, VOCABULARY) and some.shape == (2, VOCABULARY)


def test_what_reads_on_the_host_is_found():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        bool(torch.arange(5).max() > 3)
