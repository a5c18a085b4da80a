"""Log-probabilities of prompt tokens equal those of transformers, for any chunks and moves."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from foretoken.running.options import demo_model
from gateway.requests.text import Text
from services.core import Grant, Pause, Residency
from services.worker.config import EngineConfig
from services.worker.engine.sampling import scored
from services.worker.engine.step import Engine
from services.worker.requests.types.prompt import Prompt, SamplingParams
from services.worker.requests.types.scores import Opening, PromptLogprobs
from tests.worker.worker_fixtures import MODELS, Feeder, engine_of, prompt_tokens, reference

SCORE = SamplingParams(temperature=0, ignore_eos=True, prompt_logprobs=4)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


def right(module: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """log_softmax at every token but the last [tokens - 1, vocabulary], by transformers."""
    with torch.no_grad():
        logits = module(torch.tensor([tokens])).logits[0, :-1]
    raw: torch.Tensor = logits.float().log_softmax(-1)
    return raw


def reported(feeder: Feeder, name: str) -> PromptLogprobs:
    """The scores sent with the first token; later tokens have none."""
    first, *others = feeder.drawn[name]
    assert not any(token.opening for token in others)
    assert first.opening is not None and first.opening.prompt_logprobs is not None
    return first.opening.prompt_logprobs


def check(scores: PromptLogprobs, raw: torch.Tensor, tokens: Sequence[int], k: int) -> None:
    assert scores.ids.tolist() == list(tokens[1:])
    chosen = raw.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scores.chosen), chosen, rtol=0, atol=1e-4)
    best = raw.topk(k).values
    torch.testing.assert_close(torch.tensor(scores.top), best, rtol=0, atol=1e-4)
    named = raw.gather(-1, torch.tensor(scores.top_ids))
    torch.testing.assert_close(named, best, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fused", ["auto", "off"])
@pytest.mark.parametrize("name", MODELS)
def test_prompt_scores_equal_the_model_s(name, fused):
    """The prompts are computed in chunks, beside a decode, a request without scores and one with 20
    alternatives; by the fused forward if the model has one, and by transformers'."""
    feeder = Feeder(engine_of(name, max_batch_tokens=9, fused_forward=fused))
    feeder.add("before", prompt_tokens(9, 4), 30, ENDLESS)
    feeder.step()
    lengths = {"a": 23, "b": 2, "c": 1, "d": 14}
    for number, (request_id, length) in enumerate(lengths.items()):
        k = 20 if request_id == "d" else 4
        how = SamplingParams(temperature=0, ignore_eos=True, prompt_logprobs=k)
        feeder.add(request_id, prompt_tokens(number, length), 2, how)
        feeder.add(f"beside {request_id}", prompt_tokens(number, length), 2, ENDLESS)
    feeder.run()
    for number, (request_id, length) in enumerate(lengths.items()):
        tokens = prompt_tokens(number, length)
        scores = reported(feeder, request_id)
        check(scores, right(reference(name), tokens), tokens, 20 if request_id == "d" else 4)
        assert feeder.output[request_id] == feeder.output[f"beside {request_id}"]
        beside = feeder.drawn[f"beside {request_id}"][0].opening
        assert beside is not None and beside.prompt_logprobs is None


@cache
def demo() -> tuple[Any, list[int], torch.Tensor]:
    """The demo model, a prompt of its training task, and the scores of the prompt's tokens."""
    module = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32).eval()
    text = "Repeat: the quick brown fox jumps over the lazy dog. " * 6
    tokens = Text(demo_model()).encode(text)
    return module, tokens, right(module, tokens)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("batch_tokens", [7, 16, 64, 512])
def test_demo_model_scores_equal_transformers(batch_tokens, overlap):
    _, tokens, raw = demo()
    config = EngineConfig(
        model=demo_model(), device="cpu", dtype="float32", kv_tokens=2048, host_gib=0,
        max_batch_tokens=batch_tokens, overlap=overlap,
    )  # fmt: skip
    feeder = Feeder(Engine.load(config))
    feeder.add("beside", tokens[5:40], 12, ENDLESS)
    feeder.add("r", tokens, 3, SCORE)
    feeder.add("again", tokens, 3, SCORE)
    feeder.run()
    for name in ("r", "again"):
        check(reported(feeder, name), raw, tokens, 4)


LENGTHS = (30, 11, 24, 17, 40, 9)


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("settings", [{}, {"host_gib": 0.01}], ids=str)
def test_evicted_prompt_is_scored_again_before_its_first_token(overlap, settings):
    """Memory is short: KV is dropped, or moves to host memory while the scores computed so far are
    kept."""
    shape = {"kv_tokens": 96, "block_tokens": 4, "max_batch_tokens": 11, **settings}
    feeder = Feeder(engine_of("llama", overlap=overlap, **shape), slice_tokens=5)
    for number, length in enumerate(LENGTHS):
        feeder.add(f"r{number}", prompt_tokens(number, length), 12, SCORE)
        for _ in range(2):
            feeder.step()
    # A request that is paused during its prefill and resumed.
    for residency in (Residency.DROP, Residency.OFFLOAD, Residency.KEEP):
        waiting = [s for s in feeder.engine.state.running.values() if s.scores is not None]
        if waiting:
            name = waiting[-1].request_id
            feeder.plan(pause=(Pause(name, residency),))
            feeder.step()
            feeder.plan(admit=(Grant(name, 12),))
            feeder.step()
    feeder.run()
    assert feeder.evictions > 0
    for number, length in enumerate(LENGTHS):
        tokens = prompt_tokens(number, length)
        check(reported(feeder, f"r{number}"), right(reference("llama"), tokens), tokens, 4)


def test_scored_prompt_publishes_to_the_cache_but_does_not_read_it():
    tokens = prompt_tokens(1, 40)
    feeder = Feeder(engine_of("llama", block_tokens=4))

    def cached(name: str, how: SamplingParams) -> int:
        feeder.add(name, tokens, 3, how)
        while name not in feeder.finished:
            feeder.step()
        opening = feeder.drawn[name][0].opening
        assert opening is not None
        return opening.cached_tokens

    assert cached("scored", SCORE) == 0
    assert cached("finds", ENDLESS) == 36  # at least one token is computed
    assert cached("scored again", SCORE) == 0
    check(reported(feeder, "scored again"), right(reference("llama"), tokens), tokens, 4)
    assert feeder.output["scored"] == feeder.output["finds"] == feeder.output["scored again"]


def test_scores_are_not_sent_again_with_delivered_output():
    """The prefix cache counts only prompt tokens, although the output was computed here, too."""
    feeder = Feeder(engine_of("llama", block_tokens=4))
    tokens = prompt_tokens(1, 10)
    feeder.add("r", tokens, 20, SCORE)
    made = feeder.run()["r"]
    engine = feeder.engine
    engine.add(Prompt("again", (*tokens, *made[:12]), 10, 20, SCORE), 0.0)
    feeder.plan(admit=(Grant("again", 20),))
    drawn = []
    while result := engine.step():
        drawn += result.tokens
    assert [token.token_id for token in drawn] == made[12:]
    assert drawn[0].opening == Opening(cached_tokens=10)


def test_scoring_logits_are_bounded_and_sliced(monkeypatch):
    """At most five tokens per step are scored; other requests use the rest of the step."""
    feeder = Feeder(engine_of("llama", max_batch_tokens=32))
    feeder.engine.state.steps.composer._max_scored_tokens = 5
    monkeypatch.setattr(scored, "SLICE", 2)
    rows: list[int] = []
    run = feeder.engine.run

    def noted(batch: Any) -> Any:
        logits = run(batch)
        rows.append(len(logits) - len(batch.sampling))
        return logits

    monkeypatch.setattr(feeder.engine, "run", noted)
    for number in range(3):
        feeder.add(f"r{number}", prompt_tokens(number, 13), 2, SCORE)
    feeder.add("other", prompt_tokens(5, 40), 2, ENDLESS)
    feeder.run()
    assert max(rows) == 5 and sum(rows) == 3 * 12
    for number in range(3):
        tokens = prompt_tokens(number, 13)
        check(reported(feeder, f"r{number}"), right(reference("llama"), tokens), tokens, 4)
