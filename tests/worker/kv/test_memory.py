"""Sizes of the KV pools on the device and in host memory, and errors if memory is short."""

from copy import deepcopy
from math import inf
from pathlib import Path

import pytest
import torch

from services.worker import machine
from services.worker.config import EngineConfig
from services.worker.engine import memory
from services.worker.engine.memory import (
    CPU_KV_TOKENS,
    GRAPH_BYTES,
    HOST_BYTES,
    PARTIALS_BYTES,
    graphs_bytes,
    host_blocks,
    kv_blocks,
    kv_memory,
    staging_bytes,
)
from services.worker.kv.capacity import KVMemory
from services.worker.machine import free_host_bytes
from services.worker.model.paged import PagedModel
from tests.worker.worker_fixtures import reference

GIB = 2**30
NATIVE_BYTES = 2 * 2 * 2 * 8 * 4  # layers, K and V, heads, dim, float32
INT8_BYTES = 2 * 2 * 2 * (8 + 4)
RECORD_BYTES = 64 * 2**10


@pytest.fixture(scope="module")
def model() -> PagedModel:
    return PagedModel(deepcopy(reference("llama")), torch.device("cpu"))


@pytest.fixture
def free(monkeypatch):
    """Sets the free host memory."""

    def set_free(free_bytes: int) -> None:
        monkeypatch.setattr(memory, "free_host_bytes", lambda: free_bytes)

    return set_free


def test_a100_memory_table() -> None:
    """80 GiB minus 26 of LLaMA2-13B's parameters and 4 of the engine leave 50. A token of KV takes
    2 · 40 layers · 40 heads · 128 · 2 bytes = 819,200: 65,536 tokens."""
    memory = KVMemory(80 * GIB, 26 * GIB, 4 * GIB, 2 * 40 * 40 * 128 * 2)
    assert memory.available_bytes == 50 * GIB
    assert memory.tokens == 65_536


def test_no_memory_gives_no_tokens() -> None:
    memory = KVMemory(8 * GIB, 7 * GIB, 2 * GIB, 1_000)
    assert memory.available_bytes == -GIB
    assert memory.tokens == 0


def test_configured_blocks_are_used(model, free):
    free(1000 * NATIVE_BYTES)
    assert kv_blocks(model, EngineConfig(kv_tokens=160)) == 10
    assert kv_blocks(model, EngineConfig(kv_tokens=160, kv_dtype="int8")) == 10
    assert kv_blocks(model, EngineConfig(kv_tokens=1000)) == 1000 // 16


def test_int8_holds_more_in_the_same_memory(model, free):
    """A quarter of the free memory; 32 bytes per head become 8 and a scale of 4."""
    free(4 * 1600 * NATIVE_BYTES)
    assert kv_blocks(model, EngineConfig()) == 100
    assert (
        kv_blocks(model, EngineConfig(kv_dtype="int8")) == 100 * NATIVE_BYTES // INT8_BYTES == 266
    )
    free(1000 * GIB)
    assert kv_blocks(model, EngineConfig()) == CPU_KV_TOKENS // 16


def test_too_many_tokens_are_refused_with_how_many_fit(model, free):
    free(1000 * NATIVE_BYTES)
    with pytest.raises(
        ValueError, match=r"kv_tokens 1001 need .* \(256 bytes.*; set it to at most 1000"
    ):
        kv_blocks(model, EngineConfig(kv_tokens=1001))
    with pytest.raises(ValueError, match=r"\(96 bytes a token\).* at most 2666"):
        kv_blocks(model, EngineConfig(kv_tokens=2667, kv_dtype="int8"))
    with pytest.raises(ValueError, match="smaller than one block of 16"):
        kv_blocks(model, EngineConfig(kv_tokens=15))


def test_configured_host_pool_is_used(free):
    free(2 * GIB)
    assert host_blocks(EngineConfig(host_gib=0), RECORD_BYTES) == 0
    assert host_blocks(EngineConfig(host_gib=0.5), RECORD_BYTES) == GIB // 2 // RECORD_BYTES
    assert host_blocks(EngineConfig(host_gib=2), RECORD_BYTES) == 2 * GIB // RECORD_BYTES
    assert host_blocks(EngineConfig(host_gib=1050 / GIB), 100) == 10, "rounded down"


def test_default_host_pool_is_a_share_of_free_memory(free):
    free(2 * GIB)
    assert host_blocks(EngineConfig(), RECORD_BYTES) == GIB // 2 // RECORD_BYTES
    assert host_blocks(EngineConfig(), RECORD_BYTES, kv_bytes=GIB) == GIB // 4 // RECORD_BYTES
    assert host_blocks(EngineConfig(), RECORD_BYTES, kv_bytes=3 * GIB) == 0
    free(1000 * GIB)
    assert host_blocks(EngineConfig(), RECORD_BYTES) == HOST_BYTES // RECORD_BYTES


def test_host_pool_above_free_memory_is_refused(free):
    free(2 * GIB)
    with pytest.raises(ValueError, match=r"host_gib 2.5: .*2.50 GiB.* 2.00 GiB .*; make it"):
        host_blocks(EngineConfig(host_gib=2.5), RECORD_BYTES)
    with pytest.raises(ValueError, match=r"host_gib 1.5: .* 1.00 GiB of free"):
        host_blocks(EngineConfig(host_gib=1.5), RECORD_BYTES, kv_bytes=GIB)
    with pytest.raises(ValueError, match=r"host_gib 1e-06: .*smaller than one block of"):
        host_blocks(EngineConfig(host_gib=1e-6), RECORD_BYTES)


def test_container_limit_bounds_free_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    free_bytes = free_host_bytes()
    assert free_bytes > 0
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5000000\n")
    (tmp_path / "memory.stat").write_text("anon 4000000\ninactive_file 300000\n")
    assert machine._free_container_bytes(tmp_path) == inf
    (tmp_path / "memory.max").write_text("8000000\n")
    assert free_host_bytes() == 8_000_000 - 5_000_000 + 300_000 < free_bytes


def test_staging_is_small():
    assert staging_bytes(torch.device("cpu")) < staging_bytes(torch.device("cuda", 0)) < GIB


def test_memory_model_equals_the_allocated_blocks(model, free):
    """On a CPU the free memory excludes the model."""
    free(1000 * NATIVE_BYTES + 7)
    memory_of = kv_memory(model, EngineConfig(), NATIVE_BYTES)
    assert memory_of == KVMemory(1000 * NATIVE_BYTES + 7, 0, 0, NATIVE_BYTES)
    assert memory_of.tokens == 1000
    assert kv_blocks(model, EngineConfig(kv_tokens=memory_of.tokens)) == 1000 // 16


def test_gpu_memory_model_table(model, monkeypatch):
    """85 of 100 GiB are usable, 30 are taken, and the engine takes 2 besides its staging."""
    monkeypatch.setattr(model, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (70 * GIB, 100 * GIB))
    monkeypatch.setattr(memory, "_forward_bytes", lambda *_: 2 * GIB)
    on_gpu = kv_memory(model, EngineConfig(), NATIVE_BYTES)
    staging = 2 * staging_bytes(torch.device("cuda", 0))
    assert on_gpu == KVMemory(85 * GIB, 30 * GIB, 2 * GIB + staging, NATIVE_BYTES)
    assert on_gpu.available_bytes == 53 * GIB - staging
    less = kv_memory(model, EngineConfig(), NATIVE_BYTES, graphs_bytes=3 * GIB)
    assert less.available_bytes == 50 * GIB - staging


def test_recorded_steps_memory_table(model, monkeypatch):
    """8 rows: a forward of 8, and for each row 96 logits in float32 and a table of 16,384
    blocks."""
    assert graphs_bytes(model, [1, 8]) == 0, "a CPU records no steps"
    monkeypatch.setattr(model, "device", torch.device("cuda", 0))
    monkeypatch.setattr(memory, "_forward_bytes", lambda _, tokens: tokens * 1000)
    assert graphs_bytes(model, []) == 0
    rows_bytes = 8 * (1000 + 96 * 4 + 16_384 * 4)
    assert graphs_bytes(model, [1, 4, 8]) == rows_bytes + PARTIALS_BYTES + 3 * GRAPH_BYTES
