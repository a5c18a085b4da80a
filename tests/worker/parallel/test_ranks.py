"""A replica of two processes answers as one does: all kinds of requests, KV transfers, and ends."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from services.core import FinishReason, Grant, Pause, Residency
from services.worker.config import EngineConfig
from services.worker.engine.ranks import RanksApart, rank_device
from services.worker.engine.step import Engine
from services.worker.parallel import leader
from services.worker.parallel.loading import load_engine, settled
from services.worker.requests.types.prompt import SamplingParams
from tests.system.children import children
from tests.worker.adapter_files import random_weights, write_adapter
from tests.worker.worker_fixtures import Feeder, prompt_tokens, reference

KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 20, "min_p": 0.01, "ignore_eos": True},
    {"temperature": 0, "repetition_penalty": 1.3, "ignore_eos": True, "prompt_logprobs": 2},
    {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "min_tokens": 9},
)
REQUESTS = 18
ALIKE = prompt_tokens(99, 40)  # the beginning of some prompts
CLEAR = 1e-3  # above the rounding differences of sums: the lead of a token, and scores


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = {}
    for name in ("llama", "qwen3", "phi3", "gpt2"):
        made[name] = str(tmp_path_factory.mktemp(name))
        reference(name).save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Folders by model and name."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        model: {
            name: write_adapter(folder / model / name, random_weights(reference(model), seed))
            for seed, name in enumerate(("a", "b"), 1)
        }
        for model in ("llama", "qwen3", "phi3")
    }


@contextmanager
def engine_over(size: int, model: str, **settings: Any) -> Iterator[Engine]:
    shape = {"device": "cpu", "kv_tokens": 384, "host_gib": 0.01, "block_tokens": 8}
    config = {**shape, "max_batch_tokens": 64, "tensor_parallel": size, **settings}
    engine = load_engine(EngineConfig(model=model, **config))
    try:
        yield engine
    finally:
        engine.ranks.close()
        assert not children(os.getpid(), leader.MODULE)


class Swapping(Feeder):
    """Evicted KV moves to host memory."""

    def plan(self, **directives: Any) -> None:
        super().plan(residency="swap", **directives)


def answers(engine: Engine) -> dict[str, tuple[list[int], FinishReason, list[float]]]:
    """Answers to a load that needs more KV than fits, of the model and all adapters; a plan pauses
    some requests and resumes them. Answers with a nearly equal choice are left out, because
    rounding decides them."""
    feeder = Swapping(engine, slice_tokens=7)
    adapters = ("", *engine.adapters.held)
    for number in range(REQUESTS):
        length = 3 + 11 * number % 50
        tokens = (ALIKE if number % 3 == 0 else ()) + prompt_tokens(number, length)
        how = SamplingParams(**KINDS[number % len(KINDS)], seed=number, logprobs=2)
        feeder.add(f"r{number}", tokens, 24, how, adapters[number % len(adapters)])
        if number % 4 == 3:
            feeder.step()
    for number in (1, 4):
        if f"r{number}" not in feeder.finished:
            feeder.plan(pause=(Pause(f"r{number}", Residency.OFFLOAD),))
            feeder.step()
            feeder.plan(admit=(Grant(f"r{number}", 24),))
    output = feeder.run()
    return {
        name: (output[name], feeder.finished[name], scores(feeder, name))
        for name in output
        if clear(feeder, name)
    }


def replaced(engine: Engine, path: str) -> list[int]:
    """The answer of adapter a, loaded from another folder while the engine runs."""
    engine.reset()
    engine.adapters.unload("a")
    engine.adapters.read("a", path)()
    feeder = Feeder(engine)
    feeder.add("again", ALIKE, 12, SamplingParams(**KINDS[1]), "a")
    return feeder.run()["again"]


def scores(feeder: Feeder, name: str) -> list[float]:
    """The scores of the prompt; none if not requested."""
    opening = feeder.drawn[name][0].opening
    assert opening is not None
    reported = opening.prompt_logprobs
    return [] if reported is None else reported.chosen.tolist()


def clear(feeder: Feeder, name: str) -> bool:
    return all(
        token.logprobs and token.logprobs.top[0] - token.logprobs.top[1] > CLEAR
        for token in feeder.drawn[name]
    )


CASES = [
    pytest.param("llama", {"max_adapters": 2, "adapter_slots": 1}, id="llama"),
    pytest.param(
        "qwen3",
        {
            "kernels": "torch",
            "prefix_sharing": False,
            "fused_forward": "off",
            "max_adapters": 2,
        },
        marks=pytest.mark.slow,
    ),
    pytest.param("qwen3", {"swap_dtype": "int8"}, marks=pytest.mark.slow),
    pytest.param("qwen3", {"kv_dtype": "int8"}, marks=pytest.mark.slow),
    pytest.param(
        "phi3", {"max_adapters": 2}, marks=pytest.mark.slow, id="phi3, with replicated heads"
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_two_ranks_answer_as_one(folders, adapters, name, settings):
    named = adapters[name] if "max_adapters" in settings else {}
    settings = {**settings, "lora_modules": named}
    difference = 1e-4 if named else CLEAR  # sums have another order
    with engine_over(1, folders[name], **settings) as engine:
        alone = {
            name: (*exact, pytest.approx(scored, abs=difference))
            for name, (*exact, scored) in answers(engine).items()
        }
        again = replaced(engine, named["b"]) if named else []
        kv_bytes, shapes = engine.kv_bytes_per_token, engine.model.shapes
        counted = engine.state.counters
    with engine_over(2, folders[name], **settings) as engine:
        assert answers(engine) == alone and len(alone) > REQUESTS / 2
        assert not named or replaced(engine, named["b"]) == again
        assert engine.can_compute()
        assert engine.state.counters == counted
        parts = 1 if name == "phi3" else 2
        assert [s.kv_heads * parts for s in engine.model.shapes] == [s.kv_heads for s in shapes]
        assert engine.kv_bytes_per_token == kv_bytes * 2 // parts
    assert counted.offloads > 3 and counted.uploads > 3
    assert bool(counted.prefix_hit_tokens) is settings.get("prefix_sharing", True)


@pytest.mark.slow
def test_ranks_end_together(folders):
    """After a reset, one rank is killed: the next step names it and is the last."""
    with engine_over(2, folders["llama"]) as engine:
        feeder = Swapping(engine)
        feeder.add("r", prompt_tokens(1, 20), 30)
        assert feeder.step()
        feeder.plan(pause=(Pause("r", Residency.OFFLOAD),))
        feeder.step()
        feeder.plan(prefetch=("r",))
        engine.reset()
        assert not engine.step()
        again = Feeder(engine)
        again.add("r", prompt_tokens(1, 20), 3)
        again.run()
        again.add("s", prompt_tokens(2, 20), 3)
        (follower,) = children(os.getpid(), leader.MODULE)
        os.kill(follower, signal.SIGKILL)
        with pytest.raises(RanksApart, match=r"rank 1 of this worker's 2 ended with signal 9"):
            again.run()
        with pytest.raises(RanksApart, match="ended with signal 9"):
            engine.ranks.check()


@pytest.mark.slow
def test_failed_step_on_one_rank_ends_all(folders, monkeypatch):
    """The step fails while the other rank waits in a collective, so that it cannot be repeated."""
    with engine_over(2, folders["llama"]) as engine:

        def breaks(*_: object) -> None:
            raise RuntimeError("a bad row")

        monkeypatch.setattr(engine.model, "forward", breaks)
        feeder = Feeder(engine)
        feeder.add("r", prompt_tokens(1, 20), 3)
        with pytest.raises(RanksApart, match="rank 0 of 2 failed: a bad row"):
            feeder.step()


@pytest.mark.parametrize(
    ("name", "size", "settings", "sentence"),
    [
        ("llama", 4, {}, "4 attention heads and 2 key-value heads cannot be split evenly over 4"),
        ("llama", 3, {}, "set tensor_parallel to a number that divides both"),
        *(
            ("llama", 2, {name: "on"}, f"{name} is on, but tensor_parallel 2 does not support it")
            for name in ("overlap", "cuda_graphs", "compile")
        ),
        ("llama", 2, {"speculative_tokens": 4}, "speculative_tokens 4 needs tensor_parallel 1"),
        ("llama", 2, {"device": "cuda:1"}, "device cuda:1 is one GPU, but tensor_parallel 2 takes"),
        (
            "gpt2",
            2,
            {},
            "transformers has no tp_plan for gpt2: set tensor_parallel to 1",
        ),
        pytest.param(
            "llama",
            2,
            {"kv_tokens": 2**50},
            "kv_tokens 1125899906842624 need",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama",
            2,
            {"host_gib": 2**30},
            "host_gib 1.07374e+09: the host pool of",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_impossible_rank_settings_are_one_sentence(folders, name, size, settings, sentence):
    with pytest.raises(ValueError) as refused, engine_over(size, folders[name], **settings):
        pass
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
    assert not children(os.getpid(), leader.MODULE)


def test_missing_folder_has_the_usual_error(tmp_path: Path):
    with pytest.raises(ValueError, match="the folder does not exist"):
        load_engine(EngineConfig(model=str(tmp_path / "none"), device="cpu", tensor_parallel=2))


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_rank_gets_its_own_gpu(folders, device, monkeypatch):
    """Of four GPUs, worker 1 gets the last two."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    def of(worker: int) -> EngineConfig:
        how = {"model": folders["llama"], "local_rank": worker, "tensor_parallel": 2}
        return settled(EngineConfig(device=device, **how))

    assert [rank_device(of(1), rank).index for rank in range(2)] == [2, 3]
    assert of(1).dtype == "float32"
    assert (of(1).overlap, of(1).cuda_graphs, of(1).compile) == ("off",) * 3
    with pytest.raises(ValueError, match="takes GPUs 4 to 5, but this machine has 4"):
        of(2)


def test_device_and_dtype_are_settled_before_ranks_start(folders):
    config = EngineConfig(model=folders["llama"], device="auto", dtype="auto", tensor_parallel=2)
    assert (settled(config).device, settled(config).dtype) == ("cpu", "float32")


@pytest.mark.slow
def test_blocked_rank_0_is_ended_after_the_loss_of_another(folders, monkeypatch):
    """Rank 0 is blocked, as in a collective that no other rank has entered."""
    ended: list[int] = []
    with engine_over(2, folders["llama"]):
        monkeypatch.setattr(leader, "END_S", 0.5)
        monkeypatch.setattr(os, "_exit", ended.append)
        (follower,) = children(os.getpid(), leader.MODULE)
        os.kill(follower, signal.SIGKILL)
        deadline_s = time.monotonic() + 20
        while not ended and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert ended == [2]
