"""A step never waits for the device: it runs on fake tensors, which have no data. An operation that
reads a value on the host raises there: `.item()`, `bool()`, `.tolist()`, an index by a mask."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from services.worker.engine.inputs import StepInputs
from services.worker.engine.sampling.sampler import Sampler
from services.worker.engine.sampling.scored import PromptScores
from services.worker.kernels.interface import AttentionOptions
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.kernels.reference.sampling import TorchSampling
from services.worker.kv.device_streams import ImmediateStreams
from services.worker.model import paged
from services.worker.model.paged import PagedModel
from services.worker.requests.types.batch import DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.types.prompt import GREEDY, SamplingParams
from services.worker.requests.types.sequence import Sequence
from tests.worker.engine.sampling_oracle import row_of
from tests.worker.worker_fixtures import EOS, MODELS, VOCABULARY, reference


class ShapeOnlyAttention:
    """Attention that returns only shapes, because a GPU's kernels are not under test."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        return q + k.mean() + v.mean()


@pytest.fixture(autouse=True)
def rows_as_a_gpu_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses PyTorch's layer operations, because Numba's read the values."""
    monkeypatch.setattr(paged, "layer_ops_for", lambda *_: TorchLayerOps())


@pytest.mark.parametrize("name", MODELS)
def test_decode_step_reads_nothing_on_the_host(name: str):
    model = PagedModel(deepcopy(reference(name)), torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, positions = torch.zeros(5, dtype=torch.long), torch.arange(5)
        every = model.forward(tokens, positions, ShapeOnlyAttention(), None)
        some = model.forward(tokens, positions, ShapeOnlyAttention(), torch.tensor([0, 3]))
    assert every.shape == (5, VOCABULARY) and some.shape == (2, VOCABULARY)


PENALTIES = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
)
EVERYTHING = SamplingParams(
    temperature=0.7, top_p=0.9, top_k=5, min_p=0.05, seed=2**62, min_tokens=4,
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logprobs=3,
)  # fmt: skip
KINDS = (
    GREEDY, PENALTIES, EVERYTHING, SamplingParams(), SamplingParams(temperature=0.5, seed=-1),
    SamplingParams(top_k=7), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1),
    SamplingParams(top_p=0.5, min_tokens=2), SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(top_k=VOCABULARY, logprobs=20),
    SamplingParams(temperature=0.0, logit_bias=((3, 1.0),)), SamplingParams(bad_tokens=((1,),)),
    SamplingParams(allowed_token_ids=(3, 4), bad_tokens=((3, 4), (4, 3, 3))),
    SamplingParams(min_tokens=9, stop_token_ids=(5, 6)),
)  # fmt: skip


def decoding(sampling: SamplingParams) -> Sequence:
    row = row_of(sampling, (3, 4, 5, 6), 2)
    row.computed = 3
    return row


def going_on(rows: list[Sequence]) -> None:
    """Continues with a token that the host does not know."""
    for row in rows:
        row.tokens.append(-1)


def fake_model(name: str) -> PagedModel:
    return PagedModel(deepcopy(reference(name)), torch.device("cpu"))


@pytest.mark.parametrize("name", MODELS)
def test_whole_step_reads_nothing_on_the_host(name: str):
    """All kinds of rows decode, and one completes a scored prompt; the next step reads their tokens
    on the device before the host has them."""
    model, rows = fake_model(name), [decoding(sampling) for sampling in KINDS]
    decodes = DecodeRows(rows, [[0]] * len(rows), 16)
    new = row_of(replace(EVERYTHING, prompt_logprobs=2), (7, 8, 9), 3)
    batch = StepBatch(decodes, [PrefillChunk(new, 0, 3, decodes.tables[0])])
    with FakeTensorMode(allow_non_fake_inputs=True):
        sampler = Sampler(model.device, VOCABULARY, {EOS}, TorchSampling(), ImmediateStreams())
        inputs = StepInputs(model.device).prepare(batch)
        logits = model.forward(inputs.tokens, inputs.positions, ShapeOnlyAttention(), inputs.rows)
        drawing = batch.sampling
        scored = PromptScores.from_logits(batch.scored, logits[len(drawing) :])
        assert [x.shape[0] for x in scored.copies] == [2, 2, 2]
        drawn = sampler.draw(drawing, logits[: len(drawing)])
        assert drawn.tokens.shape == (len(rows) + 1,) and drawn.tokens.dtype == torch.long
        for _ in range(2):  # the second needs no new plan
            going_on(drawing)
            positions = torch.arange(len(rows) + 1)
            logits = model.forward(drawn.tokens, positions, ShapeOnlyAttention(), None)
            drawn = sampler.draw(drawing, logits)
        going_on(drawing)
        for row, sequence in enumerate(drawing):
            sequence.sampling_row = row
        drawn = sampler.draw(drawing[1:], logits[1:])  # another plan, with unknown tokens
        with pytest.raises(DataDependentOutputException):
            drawn.to_host()  # the only wait


@pytest.mark.parametrize("sampling", KINDS, ids=str)
def test_batch_of_one_kind_reads_nothing_on_the_host(sampling: SamplingParams):
    with FakeTensorMode(allow_non_fake_inputs=True):
        sampler = Sampler(torch.device("cpu"), 5_000, {EOS}, TorchSampling(), ImmediateStreams())
        rows = [decoding(sampling) for _ in range(3)]
        for _ in range(3):
            assert sampler.draw(rows, torch.randn(3, 5_000)).tokens.shape == (3,)
            going_on(rows)


def test_host_read_is_detected():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        bool(torch.arange(5).max() > 3)
