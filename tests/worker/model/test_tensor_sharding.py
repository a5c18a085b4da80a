"""Models sharded by their tp_plan, with threads as ranks: together they compute the whole
result."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from services.worker.model.paged import PagedModel
from services.worker.model.probe import Probe
from services.worker.model.rank_group import RankGroup
from services.worker.model.tensor_sharding import TensorSharder, require_even_heads
from tests.worker.worker_fixtures import GROUPED, MODELS, SIZES, reference

CPU = torch.device("cpu")
PLANNED = [name for name in MODELS if name not in ("opt", "gpt2")]


class Threads:
    """Exchanges tensors between the threads of a group."""

    def __init__(self, size: int):
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.barrier = Barrier(size, timeout=20)


@dataclass(frozen=True)
class ThreadGroup(RankGroup):
    threads: Threads

    def _all(self, x: Tensor) -> list[Tensor]:
        self.threads.parts[self.rank] = x.clone()
        self.threads.barrier.wait()
        parts = list(self.threads.parts)
        self.threads.barrier.wait()
        return parts

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._all(x)).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._all(x), -1)


def each_rank(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    threads = Threads(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadGroup(rank, size, threads) for rank in range(size)]))


def logits_of(model: PagedModel) -> Tensor:
    tokens = torch.arange(3, 20)
    return model.forward(tokens, torch.arange(len(tokens)), Probe(), None)


def cut_and_run(
    module: PreTrainedModel, fuse: bool, group: ThreadGroup
) -> tuple[Tensor, PagedModel]:
    part = deepcopy(module)
    TensorSharder(group).shard(part)
    model = PagedModel(part, CPU, fuse, group)
    return logits_of(model), model


def check(
    module: PreTrainedModel, size: int, kv_heads: int, fuse: bool = False
) -> list[PagedModel]:
    """All ranks have all logits, and an equal number of KV heads. Returns the models of the
    ranks."""
    own = logits_of(PagedModel(deepcopy(module), CPU, fuse=False))
    ranks = each_rank(size, partial(cut_and_run, module, fuse))
    for logits, model in ranks:
        assert torch.allclose(logits, own, rtol=0, atol=1e-4 * float(own.abs().max()))
        assert torch.equal(logits, ranks[0][0]), "the ranks have equal logits"
        assert [shape.kv_heads for shape in model.shapes] == [kv_heads] * len(model.shapes)
    return [model for _, model in ranks]


@pytest.mark.parametrize("name", PLANNED)
def test_two_ranks_compute_the_whole_result(name):
    """Phi-3 has one map for q, k and v, which transformers replicates."""
    heads = {"pythia": 2, "phi3": 2}.get(name, 1)
    models = check(reference(name), 2, heads)
    numbers = [sum(p.numel() for p in set(m.module.parameters())) for m in models]
    whole = sum(p.numel() for p in set(reference(name).parameters()))
    assert max(numbers) < 0.6 * whole


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3"])
def test_fused_forward_runs_on_shards(name):
    """Each rank uses it if it agrees with transformers' forward at start."""
    for model in check(reference(name), 2, 2 if name == "phi3" else 1, fuse=True):
        divergence = "transformers' forward (its joined projections cannot be sharded by head)"
        assert model.forward_name == (divergence if name == "phi3" else "fused forward")


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**GROUPED, **settings})).eval()


def test_four_ranks_add_biases_once():
    biased = llama(num_key_value_heads=4, attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, weight in biased.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
    for fuse in (False, True):
        check(biased, 4, 1, fuse)


@pytest.mark.parametrize("fuse", [False, True])
def test_uneven_split_is_an_error(fuse):
    """A vocabulary of 97 and its tied head are replicated; an MLP of 61 is divided into 30 and
    31."""
    uneven = llama(vocab_size=97, intermediate_size=61, tie_word_embeddings=True)
    first, second = check(uneven, 2, 1, fuse)
    assert [m.module.model.layers[0].mlp.down_proj.in_features for m in (first, second)] == [30, 31]
    assert first.module.lm_head.weight.shape[0] == 97


@pytest.mark.parametrize("fuse", [False, True])
def test_tied_head_stays_tied(fuse):
    for model in check(llama(tie_word_embeddings=True), 2, 1, fuse):
        assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
        assert model.module.lm_head.weight.shape[0] == 48


class OtherLinear(nn.Linear):
    """Another class of linear map, such as a quantised one."""


def replace_a_map(module: PreTrainedModel) -> None:
    module.model.layers[1].mlp.up_proj = OtherLinear(32, 64, bias=False)


def ask_for_experts(module: PreTrainedModel) -> None:
    module._tp_plan["model.layers.*.mlp"] = "moe_tp_experts"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (replace_a_map, "the tp_plan of LlamaForCausalLM uses colwise, which is not"),
        (ask_for_experts, "uses moe_tp_experts, which is not supported"),
        (lambda module: module._tp_plan.clear(), "no tp_plan for LlamaForCausalLM: set tensor_par"),
    ],
)
def test_unknown_parallel_plan_is_refused(change, sentence):
    module = llama()
    change(module)
    with pytest.raises(ValueError, match=sentence):
        TensorSharder(ThreadGroup(0, 2, Threads(2))).shard(module)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "fits"),
    [(4, 2, 2, True), (4, 2, 4, False), (4, None, 4, True), (8, 8, 3, False), (8, 1, 2, False)],
)
def test_ranks_have_equal_head_counts(heads, kv_heads, size, fits):
    config = LlamaConfig(**{**SIZES, "num_attention_heads": heads, "num_key_value_heads": kv_heads})
    plan = config.base_model_tp_plan or {}
    if fits:
        require_even_heads(config, plan, size)
        return
    with pytest.raises(ValueError, match=f"cannot be split evenly over {size} ranks"):
        require_even_heads(config, plan, size)
