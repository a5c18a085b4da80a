"""Model weights: one memory check before loading, and logged progress of slow loads."""

import json
import logging
import os
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers.utils import logging as transformers_logging

from services.worker.model import weights
from services.worker.model.paged import load_model
from services.worker.model.weights import (
    logged_loading,
    logged_progress,
    needed_bytes,
    require_memory,
    stored_elements,
)
from tests.worker.worker_fixtures import reference

CPU = torch.device("cpu")
GIB = 2**30
MAPS = Path("/proc/self/maps")


def claim(path: Path, elements: int, dtype: str = "BF16") -> None:
    """A safetensors file with one tensor of 2-byte elements, stored as a hole."""
    stored = {"dtype": dtype, "shape": [elements // 8, 8], "data_offsets": [0, 2 * elements]}
    header = json.dumps({"weight": stored}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 2 * elements)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    reference("llama").config.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    def set_free(gib: float) -> None:
        monkeypatch.setattr(weights, "free_host_bytes", lambda: int(gib * GIB))

    return set_free


def test_model_larger_than_memory_is_refused_before_reading(folder):
    claim(folder / "model.safetensors", 2**39)
    sentence = r"cannot load model .*: its weights take 2048\.0 GiB as float32, but only "
    with pytest.raises(ValueError, match=sentence) as no:
        load_model(str(folder), CPU)
    assert "of host memory are free: use a smaller model, or a machine with more memory" in str(
        no.value
    )
    assert "\n" not in str(no.value)


def test_half_precision_is_proposed_if_it_fits(folder, free):
    """6 Gi of elements: 12 GiB as stored and as bfloat16, 24 GiB as float32."""
    claim(folder / "model.safetensors", 6 * 2**30)
    free(24)
    require_memory(str(folder), CPU, "float32")
    free(23)
    sentence = r"24\.0 GiB as float32, but only 23\.0 GiB of host memory are free"
    with pytest.raises(ValueError, match=sentence) as no:
        require_memory(str(folder), CPU, "float32")
    assert str(no.value).endswith("set dtype to bfloat16, which takes 12.0 GiB")
    require_memory(str(folder), CPU, "bfloat16")
    free(11)
    for dtype in ("float32", "bfloat16", "float16"):
        with pytest.raises(ValueError, match=r"use a smaller model, or a machine with more"):
            require_memory(str(folder), CPU, dtype)


def test_all_files_of_an_index_count(folder, free):
    claim(folder / "a.safetensors", 2**30)
    claim(folder / "b.safetensors", 2**31, "F16")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert stored_elements(str(folder), HfApi()) == {"BF16": 2**30, "F16": 2**31}
    free(5.9)
    with pytest.raises(ValueError, match=r"take 6\.0 GiB as float16, but only 5\.9 GiB"):
        require_memory(str(folder), CPU, "float16")
    (folder / "b.safetensors").unlink()  # loading reports the missing file
    require_memory(str(folder), CPU, "float16")


def test_bytes_are_of_the_loaded_dtype_and_only_floats_are_converted():
    elements = {"F32": 10, "BF16": 100, "U8": 1_000, "F8_E4M3": 10_000, "made-up": 10**9}
    assert needed_bytes(elements, "float32") == 40 + 400 + 11_000
    assert needed_bytes(elements, "bfloat16") == 20 + 200 + 11_000
    assert needed_bytes(elements, "auto") == 40 + 200 + 11_000
    assert needed_bytes({}, "float32") == 0


def test_other_formats_are_left_to_loading(folder, free):
    free(0)
    require_memory(str(folder), CPU, "float32")
    (folder / "pytorch_model.bin").write_bytes(b"0" * 100)
    require_memory(str(folder), CPU, "float32")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HfApi]:
    """A Hub with these files: made/small has 3 Gi elements, and is in no cache."""

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

        def do_GET(self) -> None:
            """Returns the requested beginning of the file, which is a hole of 6 GiB."""
            self.send_response(206)
            self.end_headers()
            with Path(self.translate_path(self.path)).open("rb") as file:
                self.wfile.write(file.read(100_001))

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    files = tmp_path / "hub" / "made" / "small" / "resolve" / "main"
    files.mkdir(parents=True)
    claim(files / "model.safetensors", 3 * 2**30)
    handler = partial(Handler, directory=str(tmp_path / "hub"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield HfApi(endpoint=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_hub_model_is_refused_before_download(hub, free, caplog):
    caplog.set_level(logging.INFO)
    free(12)
    require_memory("made/small", CPU, "float32", hub)
    assert "downloading made/small from the Hub: 6.0 GiB" in caplog.text
    free(11)
    with pytest.raises(ValueError, match=r"take 12\.0 GiB as float32, but only 11\.0 GiB"):
        require_memory("made/small", CPU, "float32", hub)
    require_memory("made/nothing", CPU, "float32", hub)  # loading reports a missing model


def file_at(tensor: Tensor) -> str:
    """The file that the memory of a tensor maps; empty if none."""
    for line in MAPS.read_text().splitlines():
        span, *_, name = [*line.split(maxsplit=5), ""][:6]
        start, end = (int(address, 16) for address in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return name.strip()
    raise AssertionError("its memory is nowhere")


@pytest.mark.skipif(not MAPS.exists(), reason="no /proc")
def test_weights_are_memory_mapped_and_copied_only_to_convert(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    stored = load_model(str(tmp_path), CPU).module.get_input_embeddings().weight
    assert file_at(stored) == str(tmp_path / "model.safetensors")
    converted = load_model(str(tmp_path), CPU, "bfloat16").module.get_input_embeddings().weight
    assert file_at(converted) != str(tmp_path / "model.safetensors")
    assert torch.equal(converted, stored.to(torch.bfloat16))


def test_slow_loading_is_logged_every_two_seconds(caplog):
    """Six items, one per second: logged at 2, 4 and 6 s, when 1, 3 and 5 are done, and at the
    end."""
    caplog.set_level(logging.INFO)
    ticks = iter(range(100))
    assert list(logged_progress("abcdef", "Loading weights", lambda: next(ticks))) == list("abcdef")
    assert [record.message for record in caplog.records] == [
        "Loading weights: 16% in 2 s",
        "Loading weights: 50% in 4 s",
        "Loading weights: 83% in 6 s",
        "Loading weights: done in 7 s",
    ]
    caplog.clear()
    assert list(logged_progress("abcdef", "Loading weights", lambda: 0.0)) == list("abcdef")
    assert not caplog.records


@pytest.mark.parametrize("every_s", [0.0, 60.0])
def test_loading_is_logged_instead_of_drawn(tmp_path, caplog, capsys, monkeypatch, every_s):
    reference("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(weights, "LOG_INTERVAL_S", every_s)
    caplog.set_level(logging.INFO)
    capsys.readouterr()
    load_model(str(tmp_path), CPU)
    assert ("Loading weights: 0% in" in caplog.text) == (every_s == 0.0)
    assert "Loading weights" not in capsys.readouterr().err
    assert transformers_logging.set_tqdm_hook(None) is None


def test_progress_bars_of_unknown_length_are_unchanged():
    with logged_loading():
        assert list(transformers_logging.tqdm(iter("abc"), desc="x", disable=True)) == list("abc")
