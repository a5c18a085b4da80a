"""The kernels of each device and dtype, refused combinations, and Numba's cache on disk."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from services.worker import compiled_code
from services.worker.kernels.cpu.attention import NumbaAttention
from services.worker.kernels.cpu.threads import wide_vectors
from services.worker.kernels.reference.attention import TorchAttention
from services.worker.kernels.reference.blocks import TorchBlocks
from services.worker.kernels.selection import kernels_for
from services.worker.kv.cache import KVShape

BLOCK = 4
CPU = torch.device("cpu")


def choose(
    dtype: torch.dtype = torch.float32, head_dim: int = 32, int8: bool = False
) -> tuple[object, object]:
    cpu = torch.device("cpu")
    return kernels_for(cpu, BLOCK, dtype, [KVShape(2, head_dim)], [4], int8)


@pytest.mark.slow
def test_cpu_selects_numba_without_importing_triton():
    code = (
        "import sys, torch; from services.worker.kv.cache import KVShape;"
        "from services.worker.kernels.selection import kernels_for;"
        "kernels_for(torch.device('cpu'), 4, torch.float32, [KVShape(2, 8)], [2]);"
        "sys.exit('services.worker.kernels.cuda.attention' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    attention, blocks = choose()
    assert isinstance(attention, NumbaAttention) and isinstance(blocks, TorchBlocks)
    assert isinstance(choose(torch.float16)[0], TorchAttention)  # which Numba does not support


KERNELS = (
    "kernels_for(cpu, 4, torch.float32, [KVShape(2, 8)]);",
    "sampling_for(cpu);",
    "layer_ops_for(cpu, torch.float32);",
)


def built(*used: str, **environment: str) -> str:
    """The output of a process that builds these kernels."""
    code = (
        "from services.worker.compiled_code import set_numba_cache_folder;"
        "set_numba_cache_folder();"
        "import sys, torch; from services.worker.kv.cache import KVShape;"
        "from services.worker.kernels.selection import sampling_for, kernels_for;"
        "from services.worker.kernels.cpu.kernel_cache import kernel_source;"
        "from services.worker.kernels.selection import layer_ops_for;"
        "cpu = torch.device('cpu');" + "".join(used) + "print(kernel_source())"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    return process.stdout.strip()


@pytest.mark.slow
def test_compiled_kernels_are_cached_and_loaded_next_time(tmp_path):
    """One kernel more than the cache has is compiled."""
    given = {name: x for name, x in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    given["XDG_CACHE_HOME"] = str(tmp_path)
    for count in (1, 2, 3):
        assert built(*KERNELS[:count], **given) == "compiled"
    assert built(*KERNELS, **given) == "loaded"
    wide = ("prefill_loops", "matmul") if wide_vectors() else ()
    for module in ("decode_loops", "sampling", "elementwise_loops", *wide):
        assert list((tmp_path / "foretoken/numba").glob(f"*/*/{module}.*.nbi"))


def test_each_kernel_version_has_its_own_cache_folder(tmp_path, monkeypatch):
    """Numba's stamp covers the file of a kernel, not the files that it imports."""
    monkeypatch.setattr(compiled_code, "KERNELS", tmp_path)
    folders = []
    for text in ("one", "other", "one"):
        (tmp_path / "lanes.py").write_text(text)
        monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
        compiled_code.set_numba_cache_folder()
        folders.append(os.environ["NUMBA_CACHE_DIR"])
    assert folders[0] == folders[2] != folders[1]
    monkeypatch.setenv("NUMBA_CACHE_DIR", "mine")
    compiled_code.set_numba_cache_folder()
    assert os.environ["NUMBA_CACHE_DIR"] == "mine"


def test_unused_kernel_caches_are_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    compiled_code.set_numba_cache_folder()
    ours, kept = Path(os.environ["NUMBA_CACHE_DIR"]), tmp_path / "foretoken/numba"
    for folder, days in ((kept / "old", 31), (kept / "new", 29), (ours, 99)):
        (folder / "kernels").mkdir(parents=True)
        os.utime(folder, (0, time.time() - days * 86_400))
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    compiled_code.set_numba_cache_folder()
    assert {each.name for each in kept.iterdir()} == {"new", ours.name}


@pytest.mark.slow
def test_single_threaded_cache_is_not_loaded_for_many_threads(tmp_path):
    """Each variant has a separate entry in the cache."""
    code = (
        "import torch; from services.worker.kv.cache import KVLayer;"
        "from services.worker.kernels.cpu import decode_loops as loops;"
        "from services.worker.kernels.cpu.attention import NumbaAttention;"
        "layer = KVLayer(torch.zeros(2, 1, 1, 4, 8));"
        "NumbaAttention(4, torch.float32, threads=2).warm(layer, torch.float32);"
        "each = [loops.attention(8, 4, many).stats for many in (False, True)];"
        "print([(sum(s.cache_hits.values()), sum(s.cache_misses.values())) for s in each])"
    )
    given = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_NUM_THREADS": "2"}
    for expected in ("[(0, 1), (0, 1)]", "[(1, 0), (1, 0)]"):
        process = subprocess.run(
            [sys.executable, "-c", code], env=given, check=True, capture_output=True, text=True
        )
        assert process.stdout.strip() == expected


@pytest.mark.slow
def test_kernel_source_is_empty_without_numba():
    of_torch = "kernels_for(cpu, 4, torch.float32, [KVShape(2, 8)], chosen='torch');"
    no_numba = "assert 'numba' not in sys.modules;"
    assert built(of_torch, "sampling_for(cpu, 'torch');", no_numba, **os.environ) == ""


def test_numba_refuses_unsupported_models():
    with pytest.raises(ValueError, match=r"not cpu with torch\.float16: set kernels to auto"):
        kernels_for(CPU, BLOCK, torch.float16, [KVShape(2, 32)], chosen="numba")


@pytest.mark.slow
def test_unsupported_model_is_refused_with_what_to_change():
    with pytest.raises(ValueError, match=r"not torch\.float64: set worker\.dtype to one of these"):
        choose(torch.float64)
    with pytest.raises(ValueError, match="heads of 4 are too small: set kv_dtype to auto"):
        choose(torch.bfloat16, head_dim=4, int8=True)
    for head_dim in (8, 40, 256):
        choose(torch.bfloat16, head_dim, int8=True)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "what"),
    [
        (torch.float32, 16, 4, "not 16: set worker.kernels to torch"),
        (torch.float32, 320, 4, "not 320: set worker.kernels to torch"),
        (torch.bfloat16, 64, 3, "3 query heads and 2 key heads: set worker.kernels to torch"),
    ],
)
def test_triton_refuses_unsupported_models(dtype, head_dim, heads, what):
    with pytest.raises(ValueError, match=what):
        kernels_for(torch.device("cuda"), 16, dtype, [KVShape(2, head_dim)], [heads])
