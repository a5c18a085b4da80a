"""Roofline: a hand-worked table, bounds, and the agreement with a measured profile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.hardware.devices import GIB, Gpu, Model, find_gpu, find_model
from simulator.hardware.hardware_file import load_hardware
from simulator.hardware.roofline import (
    Roofline,
    derive_bounds,
    derive_cost,
    derive_host_tokens,
    derive_kv_tokens,
)

# 1e12 B/s, 1e14 operations/s, 1e10 B/s to the host, 1e11 B/s to its peers, 1 us each time.
GPU = Gpu(
    memory_gib=32.0,
    bandwidth=1e12,
    float32_flops=1e13,
    float16_flops=1e14,
    int8_flops=2e14,
    host_bandwidth=1e10,
    link_bandwidth=1e11,
    link_latency_s=1e-6,
)
# 1e9 weights of which 0.1e9 are the input embedding; 2*10*4*64 = 5,120 KV values a token.
MODEL = Model(
    parameters=1_000_000_000,
    layers=10,
    hidden=1_000,
    kv_heads=4,
    head_size=64,
    vocabulary=100_000,
    context_tokens=4_096,
)
IDEAL = {
    "bandwidth_efficiency": 1.0,
    "flops_efficiency": 1.0,
    "host_efficiency": 1.0,
    "link_efficiency": 1.0,
    "decode_flops_share": 1.0,
    "step_overhead_s": 0.0,
}


def ideal(**changes: object) -> Roofline:
    return Roofline.model_validate({"gpu": GPU, "model": MODEL, **IDEAL, **changes})


# Columns: base, prefill token, decoded sequence, context token, swapped token, quantized token.
# One GPU in float16: 0.9e9 weights of 2 B take 1.8 ms, 1.8e9 operations 18 us, 10,240 B of KV
# 10.24 ns on the device and 1.024 us over the link. Two GPUs halve these; 2 all-reduces in each of
# 10 layers take 20 us, and move 20·2·(1/2)·2,000 B = 40 kB a token: 0.4 us. INT8 KV has half the
# bytes; quantizing reads 10,240 B and writes 5,120 B on the way out, and the reverse on the way in.
TABLE = [
    ({}, (1.8e-3, 18e-6, 18e-6, 10.24e-9, 1.024e-6, 0.0)),
    ({"tensor_parallel": 2}, (0.92e-3, 9.4e-6, 9.4e-6, 5.12e-9, 0.512e-6, 0.0)),
    ({"dtype": "float32"}, (3.6e-3, 180e-6, 180e-6, 20.48e-9, 2.048e-6, 0.0)),
    ({"dtype": "int8"}, (0.9e-3, 9e-6, 9e-6, 10.24e-9, 1.024e-6, 0.0)),
    ({"dtype": "int4"}, (0.45e-3, 18e-6, 18e-6, 10.24e-9, 1.024e-6, 0.0)),
    ({"kv_dtype": "int8"}, (1.8e-3, 18e-6, 18e-6, 5.12e-9, 0.512e-6, 0.0)),
    ({"host_kv_dtype": "int8"}, (1.8e-3, 18e-6, 18e-6, 10.24e-9, 0.512e-6, 30.72e-9)),
    ({"bandwidth_efficiency": 0.5}, (3.6e-3, 18e-6, 18e-6, 20.48e-9, 1.024e-6, 0.0)),
    ({"flops_efficiency": 0.5}, (1.8e-3, 36e-6, 36e-6, 10.24e-9, 1.024e-6, 0.0)),
    ({"decode_flops_share": 0.25}, (1.8e-3, 18e-6, 4.5e-6, 10.24e-9, 1.024e-6, 0.0)),
    ({"step_overhead_s": 1e-3}, (2.8e-3, 18e-6, 18e-6, 10.24e-9, 1.024e-6, 0.0)),
]


@pytest.mark.parametrize(("changes", "expected"), TABLE)
def test_roofline_costs_match_worked_examples(changes, expected):
    cost = derive_cost(ideal(**changes))
    found = (
        cost.base_s,
        cost.prefill_token_s,
        cost.decode_seq_s,
        cost.context_token_s,
        cost.offload_token_s,
        cost.quantize_token_s,
    )
    assert found == pytest.approx(expected)
    assert cost.upload_token_s == cost.offload_token_s


def test_kv_heads_fewer_than_gpus_are_replicated():
    eight = derive_cost(ideal(tensor_parallel=8))
    four = derive_cost(ideal(tensor_parallel=4))
    assert eight.context_token_s == pytest.approx(four.context_token_s)
    assert derive_kv_tokens(ideal(tensor_parallel=8), 1.0, 0.0) == int(
        (32 * GIB - 2e9 / 8) / (10_240 / 4)
    )


def test_tied_embeddings_are_read_every_step():
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    assert derive_cost(ideal(model=tied)).base_s == pytest.approx(2e-3)


def test_kv_capacity_is_memory_without_weights_and_workspace():
    assert derive_kv_tokens(ideal(), 0.5, 1.0) == int((15 * GIB - 2e9) / 10_240)
    assert derive_host_tokens(ideal(host_kv_dtype="int8"), 1.0) == GIB // 5_120


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"^128\.5 GiB of weights on 1 GPU of 80 GiB leave no"):
        derive_kv_tokens(Roofline(gpu="a100-80g", model="llama2-70b"), 0.9, 1.0)


@given(st.integers(1, 8), st.sampled_from(("float32", "float16", "int8", "int4")))
def test_bounds_are_below_costs_and_gpus_share_the_work(size, dtype):
    roofline = ideal(tensor_parallel=size, dtype=dtype)
    bounds, cost = derive_bounds(roofline), derive_cost(roofline)
    assert bounds.base_s <= cost.base_s * (1 + 1e-9)
    assert bounds.context_token_s <= cost.context_token_s * (1 + 1e-9)
    alone = derive_bounds(ideal(dtype=dtype))
    assert bounds.base_s * size == pytest.approx(alone.base_s)


@pytest.mark.parametrize("name", ["rtx4090-llama3.1-8b", "rtxpro6000-llama3.1-8b"])
def test_roofline_defaults_agree_with_measured_profiles(name):
    """Within 12 % at the measured loads: prompt tokens, sequences and context of a step."""
    gpu, model = name.split("-", 1)
    derived = derive_cost(Roofline(gpu=gpu, model=model, dtype="bfloat16"))
    measured = load_hardware(name).cost
    for load in ((0, 1, 1_000), (0, 16, 22_000), (25, 37, 39_000), (50, 32, 40_000)):
        expected = measured.step_s(*load)
        low, high = (0.88, 1.12) if load[1] > 1 else (0.9, 1.35)  # launches at a small batch
        assert low <= derived.step_s(*load) / expected <= high, load


def test_unknown_gpu_or_model_error_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"unknown gpu 'a100-80', did you mean a100-80g\?"):
        find_gpu("a100-80")
    with pytest.raises(ValueError, match=r"unknown model 'lama2-7b', did you mean llama2-7b\?"):
        find_model("lama2-7b")
    with pytest.raises(ValueError, match=r"unknown gpu 'tpu'; known: v100-32g, a100-40g, a100-80g"):
        find_gpu("tpu")


def test_model_shapes_have_published_kv_sizes():
    """Bytes per token in float16: 512 KiB, 800 KiB, and with grouped queries 128 and 320 KiB."""
    kib = {n: find_model(n).kv_bytes("float16") / 1024 for n in ("llama2-7b", "llama2-13b")}
    assert kib == {"llama2-7b": 512, "llama2-13b": 800}
    grouped = {n: find_model(n).kv_bytes("float16") / 1024 for n in ("llama3-8b", "llama3-70b")}
    assert grouped == {"llama3-8b": 128, "llama3-70b": 320}
