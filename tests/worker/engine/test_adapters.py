"""The engine with adapters: mixed batches give each request the answer of its merged model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams
from tests.worker.adapter_files import Weights, merged, random_weights, write_adapter
from tests.worker.worker_fixtures import (
    Feeder,
    PausingFeeder,
    make_engine,
    prompt_tokens,
    reference,
)

NAMES = ("", "a", "b", "c")
TOKENS = 10
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
Answers = Mapping[tuple[str, int], list[int]]  # by adapter and prompt length


@pytest.fixture(scope="module")
def weights() -> Mapping[str, Weights]:
    return {
        name: random_weights(reference("llama"), seed, rank)
        for name, seed, rank in (("a", 1, 4), ("b", 2, 8), ("c", 3, 1))
    }


@pytest.fixture(scope="module")
def folder(weights: Mapping[str, Weights], tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("adapters")
    for name, each in weights.items():
        write_adapter(folder / name, each)
    return folder


@pytest.fixture(scope="module")
def expected(weights: Mapping[str, Weights]) -> Answers:
    """Greedy answers of the merged models."""
    answers = {}
    for name in NAMES:
        module = merged(reference("llama"), weights.get(name, {}))
        for length in (3, 40):
            tokens = list(prompt_tokens(length, length))
            for _ in range(TOKENS):
                with torch.inference_mode():
                    tokens.append(int(module(torch.tensor([tokens])).logits[0, -1].argmax()))
            answers[name, length] = tokens[length:]
    return answers


def load(folder: Path, names: tuple[str, ...] = NAMES[1:], **settings: Any) -> Engine:
    engine = make_engine(reference("llama"), **{"max_adapters": 3, "max_lora_rank": 8, **settings})
    for name in names:
        engine.adapters.read(name, str(folder / name))()
    return engine


def check(feeder: Feeder, expected: Answers) -> None:
    for name, length in expected:
        feeder.add(f"{name}-{length}", prompt_tokens(length, length), TOKENS, ENDLESS, name)
    output = feeder.run()
    for (name, length), answer in expected.items():
        assert output[f"{name}-{length}"] == answer, (name, length)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_tokens": 7},
        {"fused_forward": "off"},
        {"speculative_tokens": 3},
        {"overlap": "on"},
        {"kernels": "torch"},
        {"adapter_slots": 1, "adapter_turn_steps": 2},
        {"adapter_slots": 2, "adapter_turn_steps": 1, "overlap": "on", "max_batch_tokens": 7},
        {"adapter_slots": 2, "speculative_tokens": 3, "fused_forward": "off"},
    ],
    ids=str,
)
def test_mixed_batch_has_the_answers_of_merged_models(
    settings: dict[str, Any], folder: Path, expected: Answers
) -> None:
    check(Feeder(load(folder, **settings), slice_tokens=4), expected)


@pytest.mark.parametrize("slots", [0, 1])
def test_paused_and_moved_requests_keep_their_adapter(
    slots: int, folder: Path, expected: Answers
) -> None:
    settings: dict[str, Any] = {"host_gib": 0.01, "adapter_slots": slots, "adapter_turn_steps": 2}
    check(PausingFeeder(load(folder, **settings)), expected)


def test_prefix_cache_is_not_shared_across_adapters(folder: Path, expected: Answers) -> None:
    engine = load(folder)
    feeder = Feeder(engine)
    for turn in range(2):
        for name in NAMES:
            prompt = prompt_tokens(40, 40)
            feeder.add(f"{turn}{name}", prompt, TOKENS, ENDLESS, name)
            feeder.run()
            hits = engine.state.counters.prefix_hit_tokens
            assert feeder.output[f"{turn}{name}"] == expected[name, 40]
            assert bool(hits) == bool(turn), "the second turn finds the first one's blocks"


def test_unloaded_adapter_serves_its_requests_to_the_end(
    folder: Path, expected: Answers, weights: Mapping[str, Weights], tmp_path: Path
) -> None:
    engine = load(folder)
    feeder = Feeder(engine)
    feeder.add("r", prompt_tokens(40, 40), TOKENS, ENDLESS, "a")
    feeder.step()
    engine.adapters.unload("a")
    store = engine.adapters.read("a", str(folder / "b"))
    with pytest.raises(ValueError, match="requests still use it"):
        store()
    assert feeder.run()["r"] == expected["a", 40]
    store()  # other weights under the name: cached KV of the old ones is not used
    feeder.add("again", prompt_tokens(40, 40), TOKENS, ENDLESS, "a")
    assert feeder.run()["again"] == expected["b", 40]
    refused = engine.add(Prompt("x", (1, 2), 2, 4, GREEDY, adapter="z"), 0.0)
    assert refused == "the adapter 'z' is not loaded"


def test_full_pool_refuses_a_further_adapter(folder: Path) -> None:
    engine = load(folder, max_adapters=3)
    with pytest.raises(ValueError, match="as many as worker\\.max_adapters allows"):
        engine.adapters.read("d", str(folder / "a"))()
    engine.adapters.unload("b")
    engine.adapters.read("d", str(folder / "a"))()
    assert engine.adapters.held.keys() == {"a", "c", "d"}
    with pytest.raises(ValueError, match="set worker\\.max_adapters"):
        make_engine(reference("llama")).adapters.read("a", str(folder / "a"))
    with pytest.raises(ValueError, match=r"set worker\.max_adapters, worker\.adapter_slots or"):
        engine.model.hold_adapters(10**6, 10**6, 10**6)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"max_adapters": 1, "lora_modules": {"a": "/a", "b": "/b"}},
            "is below the 2 lora_modules",
        ),
        ({"adapter_slots": 3, "max_adapters": 2}, "adapter_slots 3 is above the 2 adapters"),
        ({"adapter_slots": 1}, "set max_adapters higher, or leave adapter_slots out"),
    ],
    ids=str,
)
def test_impossible_numbers_of_adapters_are_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"use_dora": True}, "is a DoRA adapter"),
        ({"bias": "all"}, "changes biases"),
        ({"modules_to_save": ["lm_head"]}, "replaces whole modules"),
        ({"trainable_token_indices": [1]}, "changes token embeddings"),
        ({"peft_type": "IA3"}, "of the type IA3"),
        ({"init_lora_weights": "pissa"}, "changes the base weights"),
        ({"new_trick": {"x": 1}}, r"a setting of an unknown kind \(new_trick\)"),
        ({"lora_alpha": "8"}, "lora_alpha that is no finite number"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "lora_alpha that is no finite number"),
        ({"alpha_pattern": {"(": 1}}, "adapter x in"),
    ],
    ids=str,
)
def test_unsupported_adapter_is_refused_with_a_sentence(
    settings: dict[str, Any],
    sentence: str,
    weights: Mapping[str, Weights],
    folder: Path,
    tmp_path: Path,
) -> None:
    path = write_adapter(tmp_path / "x", weights["a"], **settings)
    with pytest.raises(ValueError, match=sentence):
        load(folder, ()).adapters.read("x", path)


def test_adapter_of_another_model_is_refused_with_a_sentence(
    weights: Mapping[str, Weights], folder: Path, tmp_path: Path
) -> None:
    engine = load(folder, (), max_lora_rank=4)
    path = "model.layers.0.self_attn.q_proj"
    down, up = weights["a"][path]
    cases = {
        "is no linear map": {"model.layers.9.self_attn.q_proj": (down, up)},
        "from 33 to 32 numbers": {path: (torch.zeros(4, 33), up)},
        "do not match": {path: (down, up[:, :3])},
        r"above worker\.max_lora_rank 4": {path: (down.repeat(2, 1), up.repeat(1, 2))},
        "no finite numbers": {path: (down * float("nan"), up)},
        "has no weights": {},
    }
    for number, (sentence, changed) in enumerate(cases.items()):
        folder = Path(write_adapter(tmp_path / str(number), changed))
        with pytest.raises(ValueError, match=sentence):
            engine.adapters.read("x", str(folder))
    (folder / "adapter_model.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot be read"):
        engine.adapters.read("x", str(folder))
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="no JSON object"):
        engine.adapters.read("x", str(folder))
    with pytest.raises(ValueError, match="does not exist"):
        engine.adapters.read("x", str(tmp_path / "none"))
