"""The fused forward equals transformers', and shares its weights."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.kernels.cpu import int8_products
from services.worker.kernels.interface import AttentionOptions
from services.worker.kernels.reference.layer_ops import TorchLayerOps
from services.worker.model.fused import FusedForward
from services.worker.model.paged import PagedModel
from services.worker.model.probe import PROBE_TOKENS, Probe, probe_tokens, relative_shift
from tests.worker.model.fused_models import (
    CPU,
    FAMILIES,
    LIMIT,
    TOKENS,
    fused,
    llama,
    made,
    own_logits,
    random_tokens,
)
from tests.worker.worker_fixtures import (
    VOCABULARY,
    Feeder,
    generate,
    make_engine,
    prompt_tokens,
    reference,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_forward_equals_transformers(name: str):
    """At both ends of the context, beyond every window."""
    module = made(FAMILIES[name])
    model = fused(module)
    for start in (0, LIMIT - TOKENS):
        ids, positions = random_tokens(start)
        own = own_logits(module, ids, positions)
        ours = model.forward(ids, positions, Probe(), None)
        assert float((ours - own).abs().max()) <= 1e-4 * float(own.abs().max())


@pytest.mark.parametrize("name", ["llama, biased", "qwen2, slides", "qwen3", "phi3, turns half"])
def test_fused_bfloat16_is_as_near_the_exact_result(name: str):
    """Both forwards round; the fused one is not much further from float32 than transformers'."""
    module = made(FAMILIES[name], torch.bfloat16)
    ids, positions = random_tokens()
    exact = own_logits(deepcopy(module).float(), ids, positions)
    theirs = (own_logits(module, ids, positions).float() - exact).norm()
    ours = (fused(module).forward(ids, positions, Probe(), None).float() - exact).norm()
    assert float(ours) <= 1.25 * float(theirs)


@pytest.mark.parametrize("rows", [[], [39], [3, 17, 39], list(range(TOKENS))])
def test_fused_forward_returns_requested_rows(rows: list[int]):
    model = fused(made(FAMILIES["qwen2, slides"]))
    ids, positions = random_tokens()
    every = model.forward(ids, positions, Probe(), None)
    some = model.forward(ids, positions, Probe(), torch.tensor(rows, dtype=torch.long))
    assert some.shape == (len(rows), VOCABULARY)
    torch.testing.assert_close(some, every[rows], rtol=1e-5, atol=1e-5)


def test_fused_rows_do_not_affect_each_other():
    """Packed with another sequence, at other positions."""
    model = fused(made(FAMILIES["llama, yarn"]))
    ids, positions = random_tokens()
    alone = model.forward(ids, positions, Probe(), None)
    both = model.forward(
        torch.cat([ids.flip(0), ids]), torch.cat([positions + 100, positions]), Probe(2), None
    )
    torch.testing.assert_close(both[TOKENS:], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [LIMIT, 2**24])
def test_rotations_with_and_without_a_table(limit: int):
    """One context is too long for a table. float32 distinguishes its positions as well as the fused
    forward."""
    module = made(partial(llama, max_position_embeddings=limit))
    model = fused(module)
    ids, positions = random_tokens(limit - TOKENS)
    own = own_logits(module, ids, positions)
    ours = model.forward(ids, positions, Probe(), None)
    assert float((ours - own).abs().max()) <= 1e-4 * float(own.abs().max())


def memory(module: nn.Module) -> int:
    """Bytes of the parameters, each storage counted once."""
    storages = [weight.untyped_storage() for weight in module.parameters()]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("name", ["llama, tied", "llama, biased", "qwen3", "phi3"])
def test_fused_weights_are_shared_with_transformers(name: str):
    module = made(FAMILIES[name])
    model = fused(module)
    moved = model.module
    assert memory(moved) == memory(module)
    assert sorted(moved.state_dict()) == sorted(module.state_dict())
    held = {weight.untyped_storage().data_ptr() for weight in moved.parameters()}
    assert isinstance(model._fused, FusedForward)
    for layer in model._fused.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert isinstance(linear.weight, torch.Tensor)
            assert linear.weight.untyped_storage().data_ptr() in held
    ids, positions = random_tokens()
    moved.set_attn_implementation("eager")
    torch.testing.assert_close(
        own_logits(moved, ids, positions), own_logits(module, ids, positions), rtol=0, atol=1e-5
    )


def test_q_k_and_v_are_one_tensor():
    attention = fused(made(FAMILIES["qwen2"])).module.model.layers[0].self_attn
    for name in ("weight", "bias"):
        parts = [getattr(m, name) for m in (attention.q_proj, attention.k_proj, attention.v_proj)]
        storages = {part.untyped_storage().data_ptr() for part in parts}
        assert len(storages) == 1
        assert parts[0].untyped_storage().nbytes() == sum(part.nbytes for part in parts)


@pytest.mark.slow
def test_bfloat16_engine_decodes():
    """Through the paged kernels, with queries that are slices of a wider row."""
    engine = make_engine(made(FAMILIES["qwen3, slides"], torch.bfloat16))
    assert engine.model.forward_name == "fused forward"
    feeder = Feeder(engine)
    for length in (3, 20):
        feeder.add(f"r{length}", tuple(range(1, 1 + length)), 12)
    output = feeder.run()
    assert all(1 <= len(answer) <= 12 for answer in output.values())


def test_fused_check_covers_windows_where_affordable():
    """A model of 1.4 M parameters and 5 layers of 128 numbers: two sequences of 1,032 tokens take 2
    · 1,032 · (1.4e6 + 2 · 1,032 · 640) = 5.6e9 multiplications; of 4,104 tokens, 5.5e10."""
    assert 2 * 1032 * (1.4e6 + 2 * 1032 * 640) < 2e10 < 2 * 4104 * (1.4e6 + 2 * 4104 * 640)
    demo = partial(probe_tokens, 1_400_000, 640)
    assert demo([None, 1024], 2048) == 1032
    assert demo([4096, 1024], 8192) == PROBE_TOKENS == 8
    assert demo([None], 2048) == 8
    assert demo([1024], 600) == 600
    assert probe_tokens(600_000_000, 28 * 2048, [512], 40_960) == 8


def test_layer_attention_arguments_are_recorded():
    noted = Probe()
    ids, positions = random_tokens()
    fused(made(FAMILIES["qwen2, slides"])).forward(ids, positions, noted, None)
    whole, slides = AttentionOptions(8**-0.5), AttentionOptions(8**-0.5, 7)
    assert [noted.options[layer] for layer in range(4)] == [whole, slides, whole, slides]


def test_fused_forward_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch):
    """Reading a value of a fake tensor raises. Uses PyTorch's layer operations, because Numba's
    read the values."""
    monkeypatch.setattr("services.worker.model.paged.layer_ops_for", lambda *_: TorchLayerOps())
    model = fused(made(FAMILIES["qwen3, slides"]))
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(TOKENS, dtype=torch.long)
        logits = model.forward(ids, ids, Probe(), ids[:3])
    assert isinstance(logits, FakeTensor)
    assert logits.shape == (3, VOCABULARY)


@pytest.mark.parametrize("numbers", [0, 2**19])
def test_weight_layout_suits_the_cpu(numbers: int, monkeypatch):
    """Small weights are input-major, large ones unchanged; results are equal."""
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


@pytest.mark.parametrize("name", ["llama, tied", "llama, biased", "qwen3, slides", "phi3"])
def test_packed_weights_have_the_same_logits(name: str, monkeypatch):
    """As if each matrix were large. The module's maps have no weights then; its embedding has."""
    monkeypatch.setattr("services.worker.model.fused.BY_INPUT_NUMBERS", 0)
    module = made(FAMILIES[name])
    model = fused(module)
    model.pack_weights()
    assert model.forward_name == "fused forward, packed weights"
    moved = model.module
    linears = [part for part in moved.modules() if isinstance(part, nn.Linear)]
    assert all(linear.weight.is_meta for linear in linears)
    assert not moved.model.embed_tokens.weight.is_meta
    assert model.parameters == module.num_parameters()
    for start in (0, LIMIT - TOKENS):
        ids, positions = random_tokens(start)
        own = own_logits(module, ids, positions)
        for rows in (TOKENS, 1):
            ours = model.forward(ids, positions, Probe(), torch.arange(rows))
            assert float((ours - own[:rows]).abs().max()) <= 1e-4 * float(own.abs().max())


def test_small_weights_and_other_forwards_are_not_packed():
    small = fused(made(FAMILIES["llama"]))
    small.pack_weights()
    assert small.forward_name == "fused forward"
    assert not any(weight.is_meta for weight in small.module.parameters())
    plain = PagedModel(made(FAMILIES["llama"]), CPU, fuse=False)
    plain.pack_weights()
    assert plain.forward_name == "transformers' forward"


def test_packed_weights_with_other_results_are_refused(monkeypatch):
    monkeypatch.setattr("services.worker.model.fused.BY_INPUT_NUMBERS", 0)
    model = fused(made(FAMILIES["llama"]))
    monkeypatch.setattr(
        "services.worker.kernels.cpu.packed_products.multiply",
        lambda x, packed, _: x @ packed.to_dense().t() * 1.01,
    )
    with pytest.raises(ValueError, match=r"with packed weights its logits .* fused_forward to off"):
        model.pack_weights()


def test_loaded_engine_with_packed_weights_answers_as_generate(tmp_path, monkeypatch):
    """Loaded from a folder as a worker does, several requests in one batch."""
    monkeypatch.setattr("services.worker.model.fused.BY_INPUT_NUMBERS", 0)
    reference("llama").save_pretrained(tmp_path)
    engine = Engine.load(EngineConfig(model=str(tmp_path), kv_tokens=2_048, host_gib=0))
    assert engine.model.forward_name == "fused forward, packed weights"
    feeder = Feeder(engine)
    prompts = {f"r{length}": prompt_tokens(length, length) for length in (3, 11, 40)}
    for name, tokens in prompts.items():
        feeder.add(name, tokens, 12)
    answers = feeder.run()
    for name, tokens in prompts.items():
        expected, lead = generate("llama", tokens, 12)
        assert lead > 1e-3 and list(answers[name]) == expected


# --- INT8 weights

needs_vnni = pytest.mark.skipif(bool(int8_products.missing()), reason="no INT8 instructions here")


@needs_vnni
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama, tied", "llama, biased", "qwen3, slides", "phi3"])
def test_int8_weights_have_nearly_the_same_logits(name: str, dtype: torch.dtype):
    module = made(FAMILIES[name], dtype)
    model = fused(module)
    model.quantize_weights()
    assert model.forward_name == "fused forward, INT8 weights"
    assert all(part.weight.is_meta for part in model.module.modules() if type(part) is nn.Linear)
    ids, positions = random_tokens()
    own = own_logits(module, ids, positions).float()
    ours = model.forward(ids, positions, Probe(), None).float()
    assert 0 < relative_shift(ours, own) < 0.3


def test_int8_weights_need_the_fused_forward_and_a_tolerant_model(monkeypatch):
    plain = PagedModel(made(FAMILIES["llama"]), CPU, fuse=False)
    with pytest.raises(ValueError, match="needs the fused forward, and transformers' forward is"):
        plain.quantize_weights()
    half = fused(made(FAMILIES["llama"], torch.float16))
    with pytest.raises(ValueError, match="int8 needs float32 or bfloat16 on a CPU: set quantizat"):
        half.quantize_weights()
    monkeypatch.setattr(int8_products, "missing", lambda: "a processor with VNNI instructions")
    model = fused(made(FAMILIES["llama"]))
    with pytest.raises(ValueError, match="int8 needs a processor with VNNI instructions: set"):
        model.quantize_weights()


@needs_vnni
def test_model_that_does_not_tolerate_int8_is_refused():
    """One input of each map is a thousand times larger than the others, so that the codes of the
    others are 0."""
    module = made(FAMILIES["llama"])
    with torch.no_grad():
        for layer in module.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[0] *= 1e3
            for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj):
                linear.weight[:, 0] *= 1e-3
    model = fused(module)
    with pytest.raises(ValueError, match=r"int8 changes this model's logits by \d+% of their size"):
        model.quantize_weights()


@needs_vnni
def test_loaded_engine_with_int8_weights_answers(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), kv_tokens=2_048, host_gib=0, quantization="int8", dtype="bfloat16"
    )
    engine = Engine.load(config)
    assert engine.model.forward_name == "fused forward, INT8 weights"
    feeder = Feeder(engine)
    for length in (3, 40):
        feeder.add(f"r{length}", prompt_tokens(length, length), 12)
    assert all(1 <= len(answer) <= 12 for answer in feeder.run().values())
    with pytest.raises(ValueError, match="compile is on, but quantization int8 is not compiled"):
        Engine.load(config.model_copy(update={"compile": "on"}))
