"""The fused forward gives what transformers' own gives, and is left aside where it doesn't."""

import logging
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from services.worker.kernels.interface import AttentionOptions
from services.worker.model.fused import FusedForward
from services.worker.model.paged import PagedModel
from services.worker.model.probe import STRETCH_TOKENS, Probe, stretch_tokens
from tests.worker_fixtures import (
    GROUPED,
    SIZES,
    VOCABULARY,
    Feeder,
    clear_cases,
    engine_of,
    make_engine,
    reference,
)

CPU = torch.device("cpu")
TOKENS = 40
LIMIT = SIZES["max_position_embeddings"]
FOUR_LAYERS: dict[str, Any] = GROUPED | {"num_hidden_layers": 4}
HALF_SLIDE: dict[str, Any] = FOUR_LAYERS | {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama(**settings: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**deepcopy(GROUPED | settings)))


def phi3(**settings: Any) -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**deepcopy(GROUPED | settings)))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama, tied": partial(llama, tie_word_embeddings=True),
    "llama, biased": partial(llama, attention_bias=True, mlp_bias=True),
    "llama, no groups": partial(llama, num_key_value_heads=4),
    "llama, wide heads": partial(llama, head_dim=16),
    "llama, linear": partial(
        llama, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama, llama3": partial(llama, rope_parameters=LLAMA3),
    "llama, yarn": partial(llama, rope_parameters=YARN),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen2, slides": lambda: Qwen2ForCausalLM(Qwen2Config(**HALF_SLIDE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "qwen3, slides": lambda: Qwen3ForCausalLM(
        Qwen3Config(**HALF_SLIDE, head_dim=16, tie_word_embeddings=True, rope_parameters=dict(YARN))
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=None)),
    "mistral, slides": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=7)),
    "phi3": phi3,
    "phi3, slides": partial(phi3, sliding_window=7),
    "phi3, turns half": partial(
        phi3,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        },
    ),
}  # fmt: skip


def made(make: Callable[[], PreTrainedModel], dtype: torch.dtype = torch.float32) -> Any:
    """A model with random norms and biases too, which a fresh one has at 1 and 0."""
    torch.manual_seed(1)
    module: Any = make().eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim == 1:
                weight.normal_(mean=0 if name.endswith("bias") else 1, std=0.3)
    return module.to(dtype)


def random_tokens(start: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return ids, torch.arange(start, start + TOKENS)


def own_logits(module: Any, ids: Tensor, positions: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = module(ids[None], position_ids=positions[None], use_cache=False).logits
    return logits[0]


def fused(module: PreTrainedModel) -> PagedModel:
    model = PagedModel(deepcopy(module), CPU)
    assert model.forward_name == "fused forward"
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_transformers_forward(name: str):
    """At both ends of the context, beyond every window."""
    module = made(FAMILIES[name])
    model = fused(module)
    for start in (0, LIMIT - TOKENS):
        ids, positions = random_tokens(start)
        own = own_logits(module, ids, positions)
        ours = model.forward(ids, positions, Probe(), None)
        assert float((ours - own).abs().max()) <= 1e-4 * float(own.abs().max())


@pytest.mark.parametrize("name", ["llama, biased", "qwen2, slides", "qwen3", "phi3, turns half"])
def test_in_bfloat16_it_is_as_near_the_exact_answer(name: str):
    """Both forwards round; ours is no further from float32 than a little more than theirs."""
    module = made(FAMILIES[name], torch.bfloat16)
    ids, positions = random_tokens()
    exact = own_logits(deepcopy(module).float(), ids, positions)
    theirs = (own_logits(module, ids, positions).float() - exact).norm()
    ours = (fused(module).forward(ids, positions, Probe(), None).float() - exact).norm()
    assert float(ours) <= 1.25 * float(theirs)


@pytest.mark.parametrize("rows", [[], [39], [3, 17, 39], list(range(TOKENS))])
def test_logits_of_the_rows_that_are_asked_for(rows: list[int]):
    model = fused(made(FAMILIES["qwen2, slides"]))
    ids, positions = random_tokens()
    every = model.forward(ids, positions, Probe(), None)
    some = model.forward(ids, positions, Probe(), torch.tensor(rows, dtype=torch.long))
    assert some.shape == (len(rows), VOCABULARY)
    torch.testing.assert_close(some, every[rows], rtol=1e-5, atol=1e-5)


def test_neighbours_in_a_row_change_nothing():
    """Packed with another sequence, at other positions."""
    model = fused(made(FAMILIES["llama, yarn"]))
    ids, positions = random_tokens()
    alone = model.forward(ids, positions, Probe(), None)
    both = model.forward(
        torch.cat([ids.flip(0), ids]), torch.cat([positions + 100, positions]), Probe(2), None
    )
    torch.testing.assert_close(both[TOKENS:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [LIMIT, 2**24])
def test_rotations_are_right_with_a_table_and_without(limit: int):
    """A context too long for a table; float32 tells its positions apart no better than ours do."""
    module = made(partial(llama, max_position_embeddings=limit))
    model = fused(module)
    ids, positions = random_tokens(limit - TOKENS)
    own = own_logits(module, ids, positions)
    ours = model.forward(ids, positions, Probe(), None)
    assert float((ours - own).abs().max()) <= 1e-4 * float(own.abs().max())


def memory(module: nn.Module) -> int:
    """Bytes behind its parameters, each storage once."""
    storages = [weight.untyped_storage() for weight in module.parameters()]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("name", ["llama, tied", "llama, biased", "qwen3", "phi3"])
def test_weights_are_shared_and_transformers_forward_still_runs(name: str):
    module = made(FAMILIES[name])
    model = fused(module)
    moved = model.module
    assert memory(moved) == memory(module)
    assert sorted(moved.state_dict()) == sorted(module.state_dict())
    held = {weight.untyped_storage().data_ptr() for weight in moved.parameters()}
    assert isinstance(model._fused, FusedForward)
    for layer in model._fused.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert linear.weight.untyped_storage().data_ptr() in held
    ids, positions = random_tokens()
    moved.set_attn_implementation("eager")
    torch.testing.assert_close(
        own_logits(moved, ids, positions), own_logits(module, ids, positions), rtol=0, atol=1e-5
    )


def test_q_k_and_v_lie_in_one_tensor():
    attention = fused(made(FAMILIES["qwen2"])).module.model.layers[0].self_attn
    for name in ("weight", "bias"):
        parts = [getattr(m, name) for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
        storages = {part.untyped_storage().data_ptr() for part in parts}
        assert len(storages) == 1
        assert parts[0].untyped_storage().nbytes() == sum(part.nbytes for part in parts)


def doubled(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return 2 * call(x)


def another_mlp(module: Any) -> None:
    mlp = module.model.layers[1].mlp
    mlp.forward = partial(doubled, mlp.forward)


def another_norm(module: Any) -> None:
    module.model.norm.forward = torch.tanh


def another_window(module: Any) -> None:
    """One that no check of a few tokens could see."""
    attention = module.model.layers[1].self_attn
    attention.forward = partial(attention.forward, sliding_window=5000)


def another_rope(module: Any) -> None:
    """From position 100 on, as a rope that switches would."""
    rotary = module.model.rotary_emb

    def later(call: Any, x: Tensor, position_ids: Tensor) -> Any:
        return call(x, position_ids * (1 + (position_ids > 100)))

    rotary.forward = partial(later, rotary.forward)


def another_shape(module: Any) -> None:
    """Its own forward reads the head size elsewhere."""
    attention = module.model.layers[0].self_attn
    other = deepcopy(attention)
    other.config = attention.config
    attention.forward = other.forward
    attention.head_dim = 5


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        (another_mlp, "moves logits by"),
        (another_norm, "moves logits by"),
        (another_window, "other options"),
        (another_rope, "moves logits by"),
        (another_shape, "it fails"),
    ],
)
def test_a_model_that_is_not_what_it_says_keeps_its_own_forward(lie: Any, told: str, caplog):
    module = made(llama)
    lie(module)
    ids, positions = random_tokens(start=150)
    own = own_logits(module, ids, positions)
    model = PagedModel(module, CPU)
    (warning,) = warnings(caplog)
    assert "left aside" in warning
    assert told in warning
    assert model.forward_name.startswith("transformers' forward (the fused one is left aside")
    ours = model.forward(ids, positions, Probe(), None)
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("services.")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


class Adapted(nn.Linear):
    """As an adapter would, it takes a linear map's place."""


def adapted() -> PreTrainedModel:
    module = llama()
    module.model.layers[0].mlp.up_proj = Adapted(32, 64, bias=False)
    return module


def hooked() -> PreTrainedModel:
    module = llama()
    module.model.layers[0].register_forward_hook(lambda *_: None)
    return module


def mixed() -> PreTrainedModel:
    module = llama()
    module.model.norm.to(torch.bfloat16)
    return module


class Derived(LlamaForCausalLM):  # type: ignore[misc]
    """Of its class, but not exactly."""


class LlamaLike(LlamaForCausalLM):  # type: ignore[misc]
    """Named as one that is known."""


LlamaLike.__name__ = "LlamaForCausalLM"

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (partial(reference, "gpt2"), "GPT2LMHeadModel has another layout"),
        (partial(reference, "gemma2"), "Gemma2ForCausalLM has another layout"),
        (lambda: Derived(LlamaConfig(**GROUPED)), "Derived has another layout"),
        (lambda: LlamaLike(LlamaConfig(**GROUPED)), "it contains a .*LlamaLike"),
        (partial(llama, hidden_act="gelu"), "it contains a .*GELU.*"),
        (adapted, "it contains a .*Adapted"),
        (mixed, "its weights are of several kinds"),
        (hooked, "a hook is set on its LlamaDecoderLayer"),
        (
            partial(
                llama, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            r"its rope \(dynamic\) depends on length",
        ),
        (partial(phi3, rope_parameters=LONGROPE), r"its rope \(longrope\) depends on length"),
    ],
)
def test_other_models_run_as_they_did(make: Any, why: str, caplog):
    model = PagedModel(deepcopy(make().eval()), CPU)
    assert not warnings(caplog)
    assert re.fullmatch(rf"transformers' forward \({why}\)", model.forward_name)


def test_it_can_be_set_off():
    assert PagedModel(deepcopy(reference("llama")), CPU, fuse=False).forward_name == (
        "transformers' forward"
    )
    cases = clear_cases("mistral", (5, 20), 8)
    for setting, name in (("auto", "fused forward"), ("off", "transformers' forward")):
        engine = engine_of("mistral", fused_forward=setting)
        assert engine.model.forward_name == name
        feeder = Feeder(engine)
        for request_id, (tokens, _) in cases.items():
            feeder.add(request_id, tokens, 8)
        assert feeder.run() == {request_id: answer for request_id, (_, answer) in cases.items()}


def test_a_bfloat16_engine_decodes():
    """Through the paged kernels, whose queries are now slices of a wider row."""
    engine = make_engine(made(FAMILIES["qwen3, slides"], torch.bfloat16))
    assert engine.model.forward_name == "fused forward"
    feeder = Feeder(engine)
    for length in (3, 20):
        feeder.add(f"r{length}", tuple(range(1, 1 + length)), 12)
    output = feeder.run()
    assert all(1 <= len(answer) <= 12 for answer in output.values())


def test_the_check_looks_beyond_windows_where_that_is_affordable():
    """A model of 1.4 M parameters and 5 layers of 128 numbers: two sequences of 1,032 tokens take
    2 · 1,032 · (1.4e6 + 2 · 1,032 · 640) = 5.6e9 multiplications, of 4,104 they take 5.5e10."""
    assert 2 * 1032 * (1.4e6 + 2 * 1032 * 640) < 2e10 < 2 * 4104 * (1.4e6 + 2 * 4104 * 640)
    demo = partial(stretch_tokens, 1_400_000, 640)
    assert demo([None, 1024], 2048) == 1032
    assert demo([4096, 1024], 8192) == STRETCH_TOKENS == 8
    assert demo([None], 2048) == 8
    assert demo([1024], 600) == 600
    assert stretch_tokens(600_000_000, 28 * 2048, [512], 40_960) == 8


def test_what_layers_ask_of_attention_is_noted():
    noted = Probe()
    ids, positions = random_tokens()
    fused(made(FAMILIES["qwen2, slides"])).forward(ids, positions, noted, None)
    whole, slides = AttentionOptions(8**-0.5), AttentionOptions(8**-0.5, 7)
    assert [noted.options[layer] for layer in range(4)] == [whole, slides, whole, slides]


def test_no_call_waits_for_the_device():
    """A fake tensor has no numbers: whatever asks for one raises."""
    model = fused(made(FAMILIES["qwen3, slides"]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(TOKENS, dtype=torch.long)
        logits = model.forward(ids, ids, Probe(), ids[:3])
    assert isinstance(logits, FakeTensor)
    assert logits.shape == (3, VOCABULARY)


@pytest.mark.parametrize("numbers", [0, 2**19])
def test_weights_lie_as_a_cpu_reads_them_fastest(numbers: int, monkeypatch):
    """Small ones input by input; large ones stay, and both give the same."""
    monkeypatch.setattr("services.worker.model.fused.BY_INPUT_NUMBERS", numbers)
    module = made(FAMILIES["llama, tied"])
    model = fused(module)
    layer = model.module.model.layers[0]
    for linear in (layer.self_attn.k_proj, layer.mlp.down_proj):
        assert linear.weight.stride(0 if numbers else 1) == 1
    assert model.module.lm_head.weight is model.module.model.embed_tokens.weight
    ids, positions = random_tokens()
    own = own_logits(module, ids, positions)
    ours = model.forward(ids, positions, Probe(), None)
    assert float((ours - own).abs().max()) <= 1e-4 * float(own.abs().max())
