"""The engine: memory, profile, long answers, and what a steady step reuses."""

import subprocess
import sys

import pytest
import torch

from services.core import Grant, Plan
from services.costs import Direction
from services.worker.config import EngineConfig
from services.worker.engine.profile import profile, profile_swaps
from services.worker.engine.step import Engine
from services.worker.requests.types.prompt import Prompt, SamplingParams
from tests.worker.worker_fixtures import Feeder, engine_of, generate, prompt_tokens, reference

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


def test_engine_grows_a_long_answer_s_table_block_by_block():
    """230 tokens in blocks of 2, while other requests start and end."""
    feeder = Feeder(engine_of("gpt2", block_tokens=2))
    feeder.add("long", prompt_tokens(5, 3), 230, ENDLESS)
    for number in range(6):
        for _ in range(9):
            feeder.step()
        feeder.add(f"short{number}", prompt_tokens(number, 20), 4, ENDLESS)
    answer, lead = generate("gpt2", prompt_tokens(5, 3), 230)
    assert lead > 1e-4
    assert feeder.run()["long"][: len(answer)] == answer


def test_batch_advances_in_place_while_the_same_sequences_decode():
    engine = engine_of("llama", block_tokens=4)
    for request_id in ("a", "b"):
        engine.add(Prompt(request_id, prompt_tokens(1, 6), 6, 50, ENDLESS), 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant("a", 50), Grant("b", 20))), 0.0)
    engine.step()
    engine.step()
    batches = []
    for _ in range(30):
        batches.append(engine.state.steps.compose())
        engine.step()
    assert len({id(batch) for batch in batches[:18]}) == 1
    assert len({id(batch) for batch in batches[19:]}) == 1  # `b` reached its budget
    assert batches[19] is not batches[0]


def test_profile_covers_prefill_and_decode_and_leaves_no_trace():
    engine = engine_of("llama", max_batch_tokens=128, kv_tokens=8192)
    timings = profile(engine, limit_s=20.0)
    assert all(timing.elapsed_s > 0 for timing in timings)
    assert {timing.decode_seqs for timing in timings if not timing.prefill_tokens} >= {1, 4, 16, 64}
    assert max(timing.prefill_tokens for timing in timings) == 128
    assert engine.state.idle and engine.state.report() is None
    feeder = Feeder(engine)
    feeder.add("r", prompt_tokens(1, 5), 4, ENDLESS)
    assert len(feeder.run()["r"]) == 4


def test_profile_swaps_whole_requests_and_leaves_no_trace():
    engine = engine_of("llama", host_gib=0.01)
    swaps = profile_swaps(engine, 20.0)
    there_and_back = [(Direction.OFFLOAD, 64), (Direction.UPLOAD, 64)]
    assert [(swap.direction, swap.tokens) for swap in swaps] == 2 * there_and_back
    assert all(0 < swap.quantize_s < swap.elapsed_s for swap in swaps)
    assert engine.state.idle and engine.state.report() is None
    assert profile_swaps(engine_of("llama"), 20.0) == [], "there is no host memory to swap to"


def test_profile_ends_with_its_time_and_leaves_no_trace():
    """The limit leaves no time for a measured step. The warm-up is outside the limit."""
    engine = engine_of("llama", host_gib=0.01)
    assert profile(engine, limit_s=0.0) == []
    assert profile_swaps(engine, limit_s=0.0) == []
    assert engine.state.idle and engine.state.report() is None


def test_cache_that_does_not_fit_is_an_error_with_a_size_that_does(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"kv_tokens 10000000000000 need .* set it to at most"):
        Engine.load(EngineConfig(model=str(tmp_path), kv_tokens=10**13))
    with pytest.raises(ValueError, match="smaller than one block"):
        Engine.load(EngineConfig(model=str(tmp_path), kv_tokens=15))


def test_default_cache_is_bounded(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    engine = Engine.load(EngineConfig(model=str(tmp_path), device="cpu"))
    assert 0 < engine.state.pool.blocks * 16 <= 65_536


def test_missing_gpu_is_a_one_sentence_error(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="PyTorch finds 0 CUDA GPUs: set device to auto or cpu"):
        Engine.load(EngineConfig(model=str(tmp_path), device="cuda"))


@pytest.mark.slow
def test_numba_start_leaves_pytorch_s_threads(tmp_path):
    """Runs in a new process, in which Numba has not started its OpenMP threads."""
    reference("llama").save_pretrained(tmp_path)
    load = (
        "import torch; from services.worker.config import EngineConfig; "
        "from services.worker.engine.step import Engine; "
        f"Engine.load(EngineConfig(model={str(tmp_path)!r}, kernels='numba', kv_tokens=64)); "
        "print(torch.get_num_threads())"
    )
    ran = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "1", "a tiny model uses one thread"
