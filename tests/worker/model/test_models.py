"""Greedy answers equal those of transformers, token for token, in any composition of steps."""

import json

import pytest
import torch

from services.core import FinishReason
from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.model.paged import load_model
from services.worker.requests.types.prompt import SamplingParams
from tests.worker.worker_fixtures import (
    EOS,
    MODELS,
    Feeder,
    clear_cases,
    engine_of,
    prompt_tokens,
    reference,
)

LENGTHS = (1, 5, 13, 16, 29, 40)
NEW_TOKENS = 24


@pytest.mark.parametrize("name", MODELS)
def test_answers_equal_generate(name: str):
    """Alone; together with chunked prefill; with memory for a third of the requests, in slices,
    also with a step in flight."""
    cases = clear_cases(name, LENGTHS, NEW_TOKENS)
    expected = {request_id: answer for request_id, (_, answer) in cases.items()}

    alone = engine_of(name)
    for request_id, (tokens, answer) in cases.items():
        feeder = Feeder(alone)
        alone.state.reset()
        feeder.add(request_id, tokens, NEW_TOKENS)
        assert feeder.run() == {request_id: answer}

    for overlap in ("off", "on"):
        together = Feeder(engine_of(name, max_batch_tokens=11, overlap=overlap))
        small = engine_of(name, kv_tokens=80, block_tokens=4, overlap=overlap)
        crowded = Feeder(small, slice_tokens=5)
        for feeder in (together, crowded):
            for request_id, (tokens, _) in cases.items():
                feeder.add(request_id, tokens, NEW_TOKENS)
            assert feeder.run() == expected
        assert crowded.evictions > 0


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_model_s(name: str):
    """Log-probabilities of every step, against one forward over the whole answer."""
    feeder = Feeder(engine_of(name, max_batch_tokens=7))
    asked = SamplingParams(temperature=0, logprobs=3, ignore_eos=True)
    for number, length in enumerate((3, 19)):
        feeder.add(f"r{number}", prompt_tokens(number, length), 12, asked)
    feeder.run()
    for number, length in enumerate((3, 19)):
        drawn = feeder.drawn[f"r{number}"]
        whole = [*prompt_tokens(number, length), *feeder.output[f"r{number}"]]
        with torch.no_grad():
            logits = reference(name)(torch.tensor([whole])).logits[0, length - 1 : -1]
        expected = logits.log_softmax(-1).topk(3).values
        got = torch.tensor([token.logprobs.top for token in drawn if token.logprobs])
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)


def test_saved_model_loads_with_its_limits(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    model = load_model(str(tmp_path), torch.device("cpu"))
    assert (model.dtype, model.max_context_tokens) == (torch.float32, 256)
    assert model.eos_ids == {0}
    assert [(s.kv_heads, s.head_dim) for s in model.shapes] == [(2, 8), (2, 8)]


def test_every_end_of_a_generation_config_counts(tmp_path):
    """The generation config's eos ids replace those of the model config; the answer ends at the
    first one drawn."""
    tokens, answer = clear_cases("llama", (5,), NEW_TOKENS)["r0"]
    late, early = answer[len(answer) // 2], answer[len(answer) // 4]
    reference("llama").save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    named = json.loads(path.read_text()) if path.exists() else {}
    for ids, expected in (([late, early], {late, early}), (late, {late}), (None, {EOS})):
        path.write_text(json.dumps(named | {"eos_token_id": ids}))
        model = load_model(str(tmp_path), torch.device("cpu"))
        assert set(model.eos_ids) == expected
        feeder = Feeder(Engine(model, EngineConfig(model="", kv_tokens=2048, host_gib=0)))
        feeder.add("r", tokens, NEW_TOKENS)
        ends = [at for at, token in enumerate(answer) if token in expected]
        length = min(ends) + 1 if ends else NEW_TOKENS
        assert feeder.run() == {"r": answer[:length]}
        assert feeder.finished["r"] is (FinishReason.STOP if ends else FinishReason.LENGTH)
