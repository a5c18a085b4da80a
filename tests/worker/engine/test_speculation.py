"""The demo model with drafts by prompt lookup: the same tokens as without, whatever happens."""

from random import Random
from typing import Any

import pytest

from foretoken.running.options import demo_model
from services.core import FinishReason
from services.worker.config import EngineConfig
from services.worker.engine.profile import profile
from services.worker.engine.step import Engine
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.prompt import SamplingParams
from tests.system.mixed_load import load_text
from tests.worker.worker_fixtures import Feeder, PausingFeeder, engine_of

GREEDY = SamplingParams(temperature=0)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
SAMPLINGS = (
    GREEDY,
    ENDLESS,
    SamplingParams(temperature=0.6, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=8, min_p=0.05, seed=3, logprobs=2),
    SamplingParams(temperature=0, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=4, min_tokens=30, logit_bias=((300, -5.0), (301, 2.0))),
    SamplingParams(temperature=0.5, seed=5, repetition_penalty=1.2, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=6, bad_tokens=((300, 301), (302,)), ignore_eos=True),
)
Request = tuple[tuple[int, ...], int, SamplingParams]


def requests() -> dict[str, Request]:
    """Counts that were given before, which are copied, and tasks that repeat nothing. All begin
    alike; lengths and samplings vary."""
    random, given = Random(0), {}
    for number in range(2 * len(SAMPLINGS)):
        first = random.randrange(100)
        asked = {"role": "user", "content": f"Count from {first} to {first + 18}."}
        counted = " ".join(str(n) for n in range(first, first + 19))
        turns = [asked, {"role": "assistant", "content": counted}, asked]
        if number % 3 == 2:
            turns = [{"role": "user", "content": f"Write star {first} times."}]
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        given[f"r{number}"] = tuple(load_text().encode_chat(turns)), 9 + 5 * (number % 9), sampling
    return given


def load(**settings: Any) -> Engine:
    defaults = {"device": "cpu", "dtype": "float32", "kv_tokens": 8192, "host_gib": 0}
    return Engine.load(EngineConfig(model=demo_model(), **{**defaults, **settings}))


def answers(feeder: Feeder) -> dict[str, list[NewToken]]:
    for name, request in requests().items():
        feeder.add(name, *request)
    feeder.run()
    return dict(feeder.drawn)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[NewToken]]:
    return answers(Feeder(load()))


def check_equal(ours: dict[str, list[NewToken]], plain: dict[str, list[NewToken]]) -> None:
    """Tokens and ends are equal, logprobs up to rounding."""
    assert ours.keys() == plain.keys()
    for name, tokens in ours.items():
        expected = plain[name]
        assert [(t.offset, t.token_id, t.finish) for t in tokens] == [
            (t.offset, t.token_id, t.finish) for t in expected
        ], name
        for ours_of_one, theirs in zip(tokens, expected, strict=True):
            if theirs.logprobs is None:
                assert ours_of_one.logprobs is None
                continue
            assert ours_of_one.logprobs is not None
            assert ours_of_one.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=1e-4)
            assert ours_of_one.logprobs.top_ids == theirs.logprobs.top_ids
            assert ours_of_one.logprobs.top == pytest.approx(theirs.logprobs.top, abs=1e-4)


@pytest.mark.parametrize("tokens", [1, 4, 20])
def test_drafted_answers_equal_plain_ones(tokens, plain):
    """20 drafted tokens are more than the kernels compute as rows of a prompt."""
    feeder = Feeder(load(speculative_tokens=tokens))
    check_equal(answers(feeder), plain)
    counters = feeder.engine.state.counters
    assert counters.accepted_tokens > counters.draft_tokens // 3 > 0
    assert counters.stray_rows == 0
    reasons = set(feeder.finished.values())
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_tokens": 24},  # prompts in chunks, drafts share the rest
        {"kv_tokens": 256},  # memory for a few requests
        {"block_tokens": 2, "prefix_sharing": False},  # drafts of several blocks
        {"prompt_lookup_min": 1, "prompt_lookup_max": 1},  # most drafts are wrong
        {"kernels": "torch"},
        {"fused_forward": "off"},
    ],
)
def test_drafted_answers_do_not_depend_on_memory_chunks_and_kernels(settings, plain):
    feeder = Feeder(load(speculative_tokens=5, **settings), slice_tokens=7)
    check_equal(answers(feeder), plain)
    assert feeder.engine.state.counters.accepted_tokens > 0
    assert (feeder.evictions > 0) == ("kv_tokens" in settings)


def test_drafted_answers_survive_pauses_and_swaps(plain):
    feeder = PausingFeeder(load(speculative_tokens=5, kv_tokens=1024, host_gib=0.02))
    check_equal(answers(feeder), plain)
    counters = feeder.engine.state.counters
    assert counters.uploads > 0 and counters.dropped > 0 and counters.accepted_tokens > 0


def test_drafts_save_steps():
    """A count that was given before takes a third of the steps, at most."""
    steps = {}
    for tokens in (0, 5):
        feeder = Feeder(load(speculative_tokens=tokens))
        feeder.add("r", *next(iter(requests().values()))[:1], 60, GREEDY)
        count = 0
        while not feeder.finished:
            feeder.step()
            count += 1
        steps[tokens] = count
    assert steps[5] <= steps[0] / 3


def test_profile_times_steps_without_drafts():
    engine = engine_of("llama", speculative_tokens=4, kv_tokens=8192)
    timings = profile(engine, limit_s=20.0)
    assert {timing.decode_seqs for timing in timings if not timing.prefill_tokens} >= {1, 4}
    assert engine.state.counters.drafts == 0
    assert engine.state.limits.drafts.most == 4


def test_overlapping_steps_with_drafts_are_refused():
    with pytest.raises(ValueError, match="set overlap to auto"):
        engine_of("llama", speculative_tokens=4, overlap="on")


def test_longest_match_below_the_shortest_is_refused():
    with pytest.raises(ValueError, match="must be at most prompt_lookup_max"):
        EngineConfig(prompt_lookup_min=9)
