"""Models for which the fused forward is not used: they run as before."""

import logging
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from services.worker.model.paged import PagedModel
from services.worker.model.probe import Probe
from tests.worker.model.fused_models import CPU, llama, made, own_logits, phi3, random_tokens
from tests.worker.worker_fixtures import (
    GROUPED,
    Feeder,
    clear_cases,
    engine_of,
    reference,
)


def doubled(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return 2 * call(x)


def another_mlp(module: Any) -> None:
    mlp = module.model.layers[1].mlp
    mlp.forward = partial(doubled, mlp.forward)


def another_norm(module: Any) -> None:
    module.model.norm.forward = torch.tanh


def another_window(module: Any) -> None:
    """A window that a check of a few tokens cannot detect."""
    attention = module.model.layers[1].self_attn
    attention.forward = partial(attention.forward, sliding_window=5000)


def another_rope(module: Any) -> None:
    """Other rotations from position 100 on, as with a switching rope."""
    rotary = module.model.rotary_emb

    def later(call: Any, x: Tensor, position_ids: Tensor) -> Any:
        return call(x, position_ids * (1 + (position_ids > 100)))

    rotary.forward = partial(later, rotary.forward)


def another_shape(module: Any) -> None:
    """Its forward reads the head size elsewhere."""
    attention = module.model.layers[0].self_attn
    other = deepcopy(attention)
    other.config = attention.config
    attention.forward = other.forward
    attention.head_dim = 5


@pytest.mark.parametrize(
    ("lie", "reported"),
    [
        (another_mlp, "logits differ by"),
        (another_norm, "logits differ by"),
        (another_window, "other options"),
        (another_rope, "logits differ by"),
        (another_shape, "it fails"),
    ],
)
def test_modified_model_keeps_its_own_forward(lie: Any, reported: str, caplog):
    module = made(llama)
    lie(module)
    ids, positions = random_tokens(start=150)
    own = own_logits(module, ids, positions)
    model = PagedModel(module, CPU)
    (warning,) = warnings(caplog)
    assert "is not used" in warning
    assert reported in warning
    assert model.forward_name.startswith("transformers' forward (the fused one is not used")
    ours = model.forward(ids, positions, Probe(), None)
    torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("services.")]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


class Adapted(nn.Linear):
    """Replaces a linear map, as an adapter does."""


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


class Derived(LlamaForCausalLM):  # type: ignore[misc]  # transformers gives it no types
    """A subclass of a known class."""


class LlamaLike(LlamaForCausalLM):  # type: ignore[misc]  # transformers gives it no types
    """Has the name of a known class."""


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
def test_other_architectures_keep_their_forward(make: Any, why: str, caplog):
    model = PagedModel(deepcopy(make().eval()), CPU)
    assert not warnings(caplog)
    assert re.fullmatch(rf"transformers' forward \({why}\)", model.forward_name)


def test_fused_forward_can_be_disabled():
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
