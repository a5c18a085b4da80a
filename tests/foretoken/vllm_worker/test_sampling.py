"""Sampling parameters in vLLM's terms, and the seed of each draw."""

from typing import Any

import pytest

from foretoken.vllm.worker.sampling import SEED, draw_seed, sampling_arguments
from services.worker.requests.types.prompt import Prompt, SamplingParams

EOS = (2, 3)


def arguments(by_position: bool = True, delivered: int = 0, **given: Any) -> dict[str, Any]:
    tokens = (7,) * (4 + delivered)
    prompt = Prompt("r", tokens, 4, 10, SamplingParams(**given))
    return sampling_arguments(prompt, EOS, by_position)


def test_each_parameter_has_its_counterpart() -> None:
    given: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.2,
        "logprobs": 3,
        "prompt_logprobs": 1,
        "min_tokens": 5,
    }
    made = arguments(**given)
    assert {key: made[key] for key in given} == given
    assert made["max_tokens"] == 10
    assert made["detokenize"] is False


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ({}, "stop_token_ids", [2, 3]),
        ({"stop_token_ids": (9,)}, "stop_token_ids", [2, 3, 9]),
        ({"stop_token_ids": (9,), "ignore_eos": True}, "stop_token_ids", [9]),
        ({"min_tokens": 99}, "min_tokens", 10),
        ({"min_tokens": 99, "grammar": "{}"}, "min_tokens", 0),
        ({"ignore_eos": True, "grammar": "{}"}, "stop_token_ids", [2, 3]),
        ({"logit_bias": ((5, -1.5),)}, "logit_bias", {5: -1.5}),
        ({}, "logit_bias", None),
        ({"allowed_token_ids": (4, 5)}, "allowed_token_ids", [4, 5]),
        ({}, "allowed_token_ids", None),
        ({"prompt_logprobs": 2}, "prompt_logprobs", 2),
    ],
)
def test_values_that_vllm_expresses_differently(
    given: dict[str, Any], key: str, expected: object
) -> None:
    assert arguments(**given)[key] == expected


def test_a_resumed_prompt_is_not_scored_again() -> None:
    assert arguments(delivered=2, prompt_logprobs=2)["prompt_logprobs"] is None


def test_only_drawn_answers_have_a_seed() -> None:
    assert arguments(seed=8)["seed"] == 8
    assert arguments(by_position=False, seed=8)["extra_args"] == {SEED: 8}
    greedy = arguments(temperature=0.0, seed=8)
    assert not {"seed", "extra_args"} & greedy.keys()
    assert 0 <= arguments(seed=2**64 - 1)["seed"] < 2**63


def test_draws_of_a_seed_and_of_neighbouring_seeds_differ_in_their_lower_32_bits() -> None:
    seeds = [draw_seed(seed, position) for seed in range(40) for position in range(40)]
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # SplitMix64's first outputs for the state 0 (Vigna's reference implementation), 63 bits.
    assert draw_seed(0, 0) == 0xE220A8397B1DCDAF & (2**63 - 1)
    assert draw_seed(0, 1) == 0x6E789E6AA1B965F4
