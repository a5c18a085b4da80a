"""INT8 keys and values: their numbers, and the quality of the demo model with them."""

from copy import deepcopy
from dataclasses import dataclass
from math import exp
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from models.batches import prompt_text
from models.evaluate import held_out_examples
from models.tasks import TASKS
from models.train import DEMO
from services.worker.engine.inputs import StepInputs
from services.worker.kernels.reference.paging import quantize
from services.worker.kernels.selection import kernels_for
from services.worker.kv.cache import KVCache, KVShape, bytes_per_token
from services.worker.kv.copies import BlockCopies
from services.worker.kv.staging import RecordLayout
from services.worker.model.paged import PagedModel, load_model
from services.worker.model.paged_attention import PagedStep
from services.worker.requests.types.batch import DecodeRows, PrefillChunk, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence
from tests.examples import examples
from tests.worker.worker_fixtures import reference

BLOCK = 16
CHUNK = 24  # one and a half blocks, so that half-filled blocks are copied, too
TURNS = 3  # the longest conversations of the model's training
CPU = torch.device("cpu")
UNSEEN = 20_417  # a seed that no training and no other test uses for held-out text
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check_row(row: Tensor) -> None:
    """Compares a row with the definition, number by number in float64."""
    codes, scale = quantize(row)
    largest = max(abs(x) for x in row.tolist())
    if largest == 0:
        assert scale.item() == 0 and not codes.any()
        return
    smallest = torch.finfo(torch.float32).tiny
    assert scale.item() == pytest.approx(max(largest / 127, smallest), rel=1e-4)
    largest_code = max(abs(code) for code in codes.tolist())
    assert largest_code == 127 or scale.item() == smallest
    assert (codes * scale).isfinite().all()
    for x, code in zip(row.tolist(), codes.tolist(), strict=True):
        assert -127 <= code <= 127
        assert abs(x - code * scale.item()) <= scale.item() / 2 * (1 + 2**-14)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=examples(200))
@given(data=st.data())
def test_live_int8_is_within_half_a_step(dtype, data):
    info = torch.finfo(dtype)
    sizes = [info.smallest_normal * info.eps, info.smallest_normal, 1e-3, 1.0, 300.0, info.max]
    numbers = st.tuples(st.sampled_from(sizes), st.floats(-1, 1, width=32))
    drawn = data.draw(st.lists(numbers.map(lambda d: d[0] * d[1]), min_size=1, max_size=9))
    check_row(torch.tensor(drawn, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_live_int8_constant_zero_denormal_and_huge_rows(dtype):
    info = torch.finfo(dtype)
    rows = (0.0, info.smallest_normal * info.eps, -info.smallest_normal, 0.1, info.max, info.min)
    for constant in rows:
        check_row(torch.full((8,), constant, dtype=dtype))
    check_row(torch.tensor([info.max, info.min, 0, 1], dtype=dtype))
    codes, scales = quantize(torch.tensor([[0.0, -127.0], [0.0, 0.0], [3.0, 1.5]], dtype=dtype))
    assert codes.tolist() == [[0, -127], [0, 0], [127, 64]]
    assert scales.tolist() == [1, 0, pytest.approx(3 / 127)]


def test_int8_token_takes_a_byte_per_number_and_a_scale_per_head():
    shapes = [KVShape(2, 64), KVShape(4, 32)]
    assert bytes_per_token(shapes, torch.bfloat16) == 2 * 2 * (2 * 64 + 4 * 32)
    assert bytes_per_token(shapes, torch.bfloat16, int8=True) == 2 * (2 * 68 + 4 * 36)
    for int8 in (False, True):
        cache = KVCache.allocate(shapes, 3, BLOCK, torch.bfloat16, CPU, int8)
        tensors = [t for layer in cache.layers for t in (layer.data, layer.scales)]
        held = sum(t.nbytes for t in tensors if t is not None)
        assert held == 3 * BLOCK * bytes_per_token(shapes, torch.bfloat16, int8)


def test_windows_and_softcaps_support_int8():
    for name in ("llama", "gemma2", "mistral"):
        PagedModel(deepcopy(reference(name)), CPU).require_int8()


def test_model_that_int8_harms_is_refused():
    """A few key channels have large biases, as in Qwen2, but larger."""
    module = deepcopy(reference("qwen2"))
    for layer in module.model.layers:
        layer.self_attn.k_proj.bias.data[:1] = 1000
    with pytest.raises(ValueError, match=r"changes this model's logits by \d+%.* kv_dtype to auto"):
        PagedModel(module, CPU).require_int8()


@dataclass
class Reader:
    """Computes text with the paged model in chunks; between chunks all KV may move to host
    memory."""

    model: PagedModel
    kv_int8: bool = False
    rests: bool = False

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [tokens, vocabulary] of a text."""
        model, blocks = self.model, -(-len(tokens) // BLOCK)
        shapes = model.shapes
        cache = KVCache.allocate(shapes, blocks + 2, BLOCK, model.dtype, CPU, self.kv_int8)
        kernels, copies = kernels_for(CPU, BLOCK, model.dtype, shapes, model.heads, self.kv_int8)
        table = torch.randperm(blocks + 2)[:blocks]
        sequence = Sequence.start(Prompt("r", tuple(tokens), len(tokens), 1), 1)
        inputs, parts = StepInputs(CPU), []
        for start in range(0, len(tokens), CHUNK):
            end = min(start + CHUNK, len(tokens))
            used = table[: -(-end // BLOCK)]
            batch = StepBatch(
                DecodeRows([], [], BLOCK), [PrefillChunk(sequence, start, end, used.numpy())]
            )
            read = inputs.prepare(batch)
            kernels.prepare(batch, read.slots)
            step = PagedStep(cache, kernels)
            parts.append(model.forward(read.tokens, read.positions, step, None))
            if self.rests:
                self._rest(cache, copies, used, end)
        return torch.cat(parts)

    def _rest(self, cache: KVCache, copies: BlockCopies, blocks: Tensor, tokens: int) -> None:
        """Copies every block to a host record, clears it, and copies it back."""
        shapes, dtype = tuple(self.model.shapes), self.model.dtype
        layout = RecordLayout(shapes, BLOCK, dtype, swap_int8=True)
        records = torch.empty(len(blocks), layout.record_bytes, dtype=torch.uint8)
        filled = torch.full((len(blocks),), BLOCK)
        filled[-1] = tokens - (len(blocks) - 1) * BLOCK
        for layer, staged in zip(cache.layers, layout.layer_views(records), strict=True):
            copies.gather(layer, blocks, filled, staged)
            layer.data.fill_(7)
            copies.scatter(layer, blocks, staged)


@dataclass(frozen=True)
class Conversation:
    """Held-out tasks in turn. `answers` marks the tokens that the model should predict."""

    tokens: list[int]
    answers: list[bool]


@dataclass
class Quality:
    """Over conversations: the perplexity of all tokens and of the answers, and the most likely next
    token at each position."""

    perplexity: float
    answers: float
    best: Tensor

    @classmethod
    def of(cls, reader: Reader, conversations: list[Conversation]) -> "Quality":
        losses, best = [], []
        for conversation in conversations:
            logits = reader.logits(conversation.tokens)
            following = torch.tensor(conversation.tokens[1:])
            losses.append(cross_entropy(logits[:-1], following, reduction="none"))
            best.append(logits.argmax(-1))
        loss = torch.cat(losses)
        known = torch.cat([torch.tensor(c.answers[1:]) for c in conversations])
        return cls(exp(loss.mean()), exp(loss[known].mean()), torch.cat(best))


@pytest.fixture(scope="module")
def demo() -> PagedModel:
    torch.set_num_threads(1)
    return load_model(str(DEMO), CPU, "float32")


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(DEMO)
    tasks = [e for e in held_out_examples(UNSEEN, 12, TASKS) if not e.plain]
    Random(UNSEEN).shuffle(tasks)
    made = []
    for first in range(0, len(tasks) - TURNS + 1, TURNS):
        tokens: list[int] = []
        answers: list[bool] = []
        for task in tasks[first : first + TURNS]:
            prompt = tokenizer.encode(prompt_text(task))
            answer = [*tokenizer.encode(task.answer), tokenizer.eos_token_id]
            tokens += prompt + answer
            answers += [False] * len(prompt) + [True] * len(answer)
        made.append(Conversation(tokens, answers))
    return made


@pytest.fixture(scope="module")
def native(demo: PagedModel, conversations: list[Conversation]) -> Quality:
    return Quality.of(Reader(demo), conversations)


def test_int8_baseline_equals_transformers(demo, conversations):
    tokens = max(conversations, key=lambda c: len(c.tokens)).tokens
    module = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    with torch.inference_mode():
        own = module(input_ids=torch.tensor(tokens)[None]).logits[0]
    torch.testing.assert_close(Reader(demo).logits(tokens), own, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("reader", [{"kv_int8": True}, {"rests": True}], ids=["live", "at rest"])
def test_demo_model_quality_in_int8(reader, demo, conversations, native):
    quality = Quality.of(Reader(demo, **reader), conversations)
    change = quality.perplexity / native.perplexity - 1
    of_answers = quality.answers / native.answers - 1
    agreement = float((quality.best == native.best).float().mean())
    print(
        f"{len(native.best)} held-out tokens: perplexity {native.perplexity:.4f} native, "
        f"{quality.perplexity:.4f} INT8 ({change:+.3%}); of the answers {native.answers:.4f} and "
        f"{quality.answers:.4f} ({of_answers:+.3%}); greedy agreement {agreement:.2%}"
    )
    assert 0 < abs(change) < 0.01
    assert 0 < abs(of_answers) < 0.01
    assert 0 < agreement <= 1
