"""In which numbers a model computes where nobody says."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from services.worker.model import dtypes
from services.worker.model.dtypes import bfloat16_gains, dtype_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def folder(at: Path, dtype: torch.dtype) -> str:
    LlamaConfig(hidden_size=32, dtype=dtype).save_pretrained(at)
    return str(at)


@pytest.mark.parametrize(
    ("own", "gains", "chosen"),
    [
        (torch.bfloat16, True, "bfloat16"),
        (torch.bfloat16, False, "float32"),
        (torch.float32, True, "float32"),  # nothing is rounded that was not
        (torch.float16, True, "float32"),
    ],
)
def test_the_fastest_is_bfloat16_where_weights_are_and_it_gains(
    own, gains, chosen, tmp_path, monkeypatch
):
    monkeypatch.setattr(dtypes, "bfloat16_gains", lambda: gains)
    assert dtype_of(folder(tmp_path, own), CPU, "fastest") == chosen


def test_a_cpu_computes_in_float32_whatever_is_faster(tmp_path, monkeypatch):
    """Workers of one model answer alike, and so does one that is started again."""
    monkeypatch.setattr(dtypes, "bfloat16_gains", lambda: True)
    assert dtype_of(folder(tmp_path, torch.bfloat16), CPU, "auto") == "float32"


def test_what_is_asked_for_is_taken_and_a_gpu_takes_the_checkpoint_s_own(tmp_path):
    name = folder(tmp_path, torch.bfloat16)
    assert dtype_of(name, CPU, "float32") == "float32"
    assert dtype_of(name, CUDA, "auto") == dtype_of(name, CUDA, "fastest") == "auto"


def test_it_is_measured(monkeypatch):
    """By a clock that says what a product in either takes."""
    took_s = {torch.float32: 1.0, torch.bfloat16: 0.9}
    monkeypatch.setattr(dtypes, "_took_s", lambda dtype, _: took_s[dtype])
    assert not bfloat16_gains()  # by less than is asked for
    took_s[torch.bfloat16] = 0.5
    assert bfloat16_gains()
