"""SamplingParams against its definition: formulas, support sets, and counted draws."""

from collections.abc import Sequence
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.worker.kernels.interface import Filters
from services.worker.kernels.reference.sampling import stream_keys, uniforms
from services.worker.requests.types.prompt import SamplingParams
from tests.examples import examples
from tests.worker.engine.sampling_oracle import WAYS, penalized, right, row_of, sample, uniform
from tests.worker.worker_fixtures import EOS, Feeder, engine_of, prompt_tokens

SIZE = 12
LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=SIZE, max_size=SIZE)


def draw(
    logits: list[float],
    sampling: SamplingParams,
    tokens: Sequence[int] = (1,),
    prompt_tokens: int = 1,
    way: str = "numba",
) -> int:
    drawn, _ = sample(torch.tensor([logits]), [row_of(sampling, tokens, prompt_tokens)], way=way)
    return drawn[0]


def many(logits: list[float], count: int, **parameters: Any) -> list[int]:
    """`count` draws with seeds 0, 1, 2 …"""
    rows = [row_of(SamplingParams(seed=seed, **parameters)) for seed in range(count)]
    return sample(torch.tensor([logits] * count), rows)[0]


@given(LOGITS)
def test_temperature_0_is_argmax(logits):
    assert logits[draw(logits, SamplingParams(temperature=0))] == max(logits)


def allowed(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """The tokens that may be drawn by definition. The set includes every token with the weight of
    one that must stay, because the order of equal tokens is not defined."""
    weights = [exp(x / temperature) for x in logits]
    order = sorted(range(SIZE), key=lambda i: -weights[i])
    kept = order[:top_k] if top_k else order
    total = sum(weights[i] for i in kept)
    nucleus: list[int] = []
    mass = 0.0
    for i in kept:
        if mass >= top_p * total and nucleus:
            break
        nucleus.append(i)
        mass += weights[i]
    strong = [i for i in nucleus if weights[i] >= min_p * weights[order[0]]]
    return {i for i in range(SIZE) if any(weights[i] == weights[j] for j in strong)}


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.integers(-40, 40), min_size=SIZE, max_size=SIZE, unique=True),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.integers(0, SIZE),
    st.sampled_from([0.11, 0.37, 0.73, 0.93, 1.0]),
    st.sampled_from([0.0, 0.013, 0.21]),
)
def test_filtered_tokens_are_never_drawn(integers, temperature, top_k, top_p, min_p):
    logits = [n / 8 for n in integers]
    drawn = many(logits, 300, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    support = allowed(logits, temperature, top_k, top_p, min_p)
    assert set(drawn) <= support
    weights = {i: exp(logits[i] / temperature) for i in support}
    likely = {i for i, w in weights.items() if w / sum(weights.values()) > 0.1}
    assert likely <= set(drawn)  # misses one with a probability of 0.9^300


@pytest.mark.parametrize(
    "parameters",
    [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 2.0}],
    ids=str,
)
def test_draws_follow_the_distribution(parameters):
    """Chi-square test over 20,000 draws, with the 0.1 % critical value."""
    logits, count = [0.3 * i for i in range(SIZE)], 20_000
    settings: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    } | parameters
    support = sorted(allowed(logits, **settings))
    weights = np.array([exp(logits[i] / settings["temperature"]) for i in support])
    expected = count * weights / weights.sum()
    counts = np.bincount(many(logits, count, **parameters), minlength=SIZE)
    assert counts.sum() == counts[support].sum() == count
    critical = {11: 31.26, 7: 24.32, 6: 22.46, 5: 20.52, 4: 18.47}[len(support) - 1]
    assert ((counts[support] - expected) ** 2 / expected).sum() < critical


def numbers(seeds: Sequence[int], positions: Sequence[int]) -> Any:
    """Random numbers as the sampler computes them, with unsigned seeds in signed integers."""
    signed = np.array([seed % 2**64 for seed in seeds], np.uint64).view(np.int64)
    return uniforms(stream_keys(torch.tensor(signed)), torch.tensor(positions)).numpy()


def test_uniforms_are_uniform_and_differ_by_seed_and_position():
    u = numbers(np.repeat(np.arange(200), 200).tolist(), np.tile(np.arange(200), 200).tolist())
    assert len(np.unique(u)) == len(u) and u.min() >= 0 and u.max() < 1
    assert np.abs(np.histogram(u, 20)[0] - 2000).max() < 5 * 2000**0.5
    table = u.reshape(200, 200)
    for pairs in (table[1:] * table[:-1], table[:, 1:] * table[:, :-1]):
        assert abs(pairs.mean() - 0.25) < 0.005  # neighbours are not correlated


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31)), min_size=1))
def test_uniforms_in_signed_arithmetic_equal_unsigned(pairs):
    seeds, positions = zip(*pairs, strict=True)
    assert numbers(seeds, positions).tolist() == uniform(seeds, positions).tolist()


ROWS = st.lists(
    st.tuples(
        LOGITS,
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.0, 0.6, 1.0]),
            top_p=st.sampled_from([0.5, 1.0]),
            top_k=st.sampled_from([0, 3]),
            min_p=st.sampled_from([0.0, 0.1]),
            seed=st.integers(-(2**63), 2**63 - 1),
            min_tokens=st.sampled_from([0, 3]),
            repetition_penalty=st.sampled_from([1.0, 1.3]),
            frequency_penalty=st.sampled_from([0.0, 0.5]),
            logprobs=st.sampled_from([None, 2]),
            stop_token_ids=st.sampled_from([(), (2, 3)]),
            logit_bias=st.sampled_from([(), ((4, 6.0), (5, -6.0))]),
            allowed_token_ids=st.sampled_from([(), (0, 1, 4, 7, 7), (3,)]),
            bad_tokens=st.sampled_from([(), ((1,), (4,)), ((4, 4), (0, 1, 4), (7, 4), (7,))]),
        ),
        st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(ROWS)
def test_row_does_not_depend_on_its_neighbours(rows):
    logits = torch.tensor([row[0] for row in rows])
    draws = [row_of(sampling, tokens) for _, sampling, tokens in rows]
    before = logits.clone()
    together, logprobs = sample(logits, draws)
    assert torch.equal(logits, before)
    for row, one in enumerate(draws):
        token, own = sample(logits[row : row + 1], [one])
        assert token == [together[row]]
        assert own.get(0) == logprobs.get(row)


def test_penalties_follow_their_formulas():
    """Prompt (1, 2), output (2, 3, 3): repetition counts {1, 2, 3}; the other penalties count 2
    once and 3 twice."""
    tokens, logits = (1, 2, 2, 3, 3), [0.0, 2.0, 2.0, 2.0, -1.0, 1.4]
    cases: list[tuple[dict[str, Any], list[float]]] = [
        ({"repetition_penalty": 2.0}, [0.0, 1.0, 1.0, 1.0, -1.0, 1.4]),
        ({"presence_penalty": 1.5}, [0.0, 2.0, 0.5, 0.5, -1.0, 1.4]),
        ({"frequency_penalty": 0.5}, [0.0, 2.0, 1.5, 1.0, -1.0, 1.4]),
        ({"presence_penalty": -2.0, "frequency_penalty": -1.0}, [0.0, 2.0, 5.0, 6.0, -1.0, 1.4]),
    ]
    for parameters, expected in cases:
        sampling = SamplingParams(temperature=0, **parameters)
        assert draw(logits, sampling, tokens, 2) == int(np.argmax(expected))
    negative = draw(
        [-1.0, -1.2, -1.5, -9.0], SamplingParams(temperature=0, repetition_penalty=2), (0,)
    )
    assert negative == 1  # −1 becomes −2


def test_min_tokens_masks_the_end():
    logits = [9.0] + [0.0] * (SIZE - 1)
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, min_tokens=2)
        assert draw(logits, sampling, (1, 5), 1) != EOS
        assert draw(logits, sampling, (1, 5, 6), 1) == EOS


@given(LOGITS, st.integers(0, 5))
def test_logprobs_are_of_the_raw_distribution(logits, top):
    sampling = SamplingParams(
        temperature=0.3, seed=4, repetition_penalty=1.5, top_k=3, logprobs=top
    )
    tokens, logprobs = sample(torch.tensor([logits]), [row_of(sampling, (1, 2))])
    total = log(sum(exp(x) for x in logits))
    assert logprobs[0].chosen == pytest.approx(logits[tokens[0]] - total, abs=1e-5)
    best = sorted(logits, reverse=True)[:top]
    assert logprobs[0].top == pytest.approx([x - total for x in best], abs=1e-5)
    assert [logits[i] for i in logprobs[0].top_ids] == best


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_p", 0.0), ("min_p", 2.0),
     ("logprobs", 21), ("repetition_penalty", 0.0), ("presence_penalty", float("inf")),
     ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("logit_bias", ((3, 100.5),)),
     ("logit_bias", ((3, float("nan")),)), ("logit_bias", ((3, 1.0), (3, 2.0))),
     ("bad_tokens", ((1,), ())), ("bad_tokens", ((1,) * 65,)), ("bad_tokens", ((1,),) * 1_025),
     ("stop_token_ids", (1,) * 4_097), ("logit_bias", tuple((i, 1.0) for i in range(4_097)))],
)  # fmt: skip
def test_invalid_parameters_name_their_field(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_seeded_answers_do_not_depend_on_concurrency():
    requests = {
        f"r{i}": (prompt_tokens(i, 4 + 3 * i), SamplingParams(seed=i, top_p=(1.0, 0.8)[i % 2]))
        for i in range(10)
    }
    together = Feeder(engine_of("llama"))
    crowded = Feeder(engine_of("llama", kv_tokens=96, block_tokens=4, max_batch_tokens=9))
    for feeder in (together, crowded):
        for request_id, (tokens, sampling) in requests.items():
            feeder.add(request_id, tokens, 20, sampling)
    expected: dict[str, list[int]] = {}
    for request_id, (tokens, sampling) in requests.items():
        alone = Feeder(engine_of("llama"))
        alone.add(request_id, tokens, 20, sampling)
        expected |= alone.run()
    assert together.run() == crowded.run() == expected
    assert crowded.evictions > 0


WIDE = 3_000
FILTERED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 7, 50, 1_400, 2_900]),
    top_p=st.sampled_from([1.0, 0.93, 0.41]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.37]),
    seed=st.integers(0, 10**6),
)
# Flat distributions have most tokens in one bin, steep ones few tokens in many bins; rounding to
# steps makes equal tokens.
SPREADS = st.tuples(st.sampled_from([0.0, 0.1, 2.0, 6.0, 40.0]), st.sampled_from([0.0, 0.25, 2.0]))


@settings(deadline=None, max_examples=examples(80))
@given(st.integers(0, 10**6), st.lists(st.tuples(SPREADS, FILTERED), min_size=1, max_size=4))
def test_draws_equal_those_of_a_full_sort(seed, rows):
    rng = np.random.default_rng(seed)

    def logits_of(spread: float, step: float) -> Any:
        values = rng.normal(scale=spread, size=WIDE)
        return np.round(values / step) * step if step else values

    logits = torch.tensor(np.array([logits_of(*shape) for shape, _ in rows]), dtype=torch.float32)
    draws = [row_of(sampling) for _, sampling in rows]
    expected = [right(logits[i].tolist(), row, []) for i, row in enumerate(draws)]
    for way in WAYS:
        together, _ = sample(logits, draws, [], way)
        alone = [sample(logits[i : i + 1], [row], [], way)[0][0] for i, row in enumerate(draws)]
        assert together == alone
        assert all(token in which for token, which in zip(together, expected, strict=True))


@settings(deadline=None, max_examples=examples(30))
@given(
    st.integers(0, 10**6),
    st.sampled_from([3, 40, 700]),
    st.sampled_from([0.3, 2.0, 8.0]),
    st.sets(st.sampled_from(["top_k", "top_p", "min_p"]), min_size=1),
)
def test_numba_sorts_one_bin_and_draws_as_a_sort_does(seed, size, spread, set_filters):
    """Hundreds of rows at once, each with different parameters."""
    rng, rows = np.random.default_rng(seed), 300
    probs = torch.tensor(rng.normal(scale=spread, size=(rows, size))).float().softmax(-1)
    top_k = rng.integers(1, size, rows, endpoint=True)
    filters = Filters(
        torch.tensor(top_k if "top_k" in set_filters else np.full(rows, 2**31)),
        torch.tensor(rng.random(rows) if "top_p" in set_filters else np.full(rows, 2.0)),
        torch.tensor(rng.random(rows) ** 3 if "min_p" in set_filters else np.zeros(rows)).float(),
        int(top_k.max()) if "top_k" in set_filters else None,
    )
    uniform = torch.tensor(rng.random(rows))
    drawn = {
        name: way.sample_filtered(probs, filters, uniform).tolist() for name, way in WAYS.items()
    }
    assert drawn["numba"] == drawn["torch"]


def test_pytorch_sorts_fully_only_for_rows_without_top_k(monkeypatch):
    """The choice needs no value of a tensor."""
    sorted_rows: list[int] = []
    sort = Tensor.sort

    def noted(tensor: Tensor, **options: Any) -> Any:
        sorted_rows.append(len(tensor))
        return sort(tensor, **options)

    monkeypatch.setattr(Tensor, "sort", noted)
    for row in ([-0.05 * i for i in range(WIDE)], [0.0] * WIDE):
        draw(row, SamplingParams(top_k=50), way="torch")
        draw(row, SamplingParams(top_k=1_500, top_p=0.9, min_p=0.1), way="torch")
        assert sorted_rows == []
        draw(row, SamplingParams(top_p=0.95), way="torch")
        draw(row, SamplingParams(min_p=0.01), way="torch")
        draw(row, SamplingParams(top_k=2_000), way="torch")
        assert sorted_rows == [1, 1, 1]
        sorted_rows.clear()


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.integers(1, 700),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_argmax_is_the_first_of_the_largest(seed, rows, size, step, dtype):
    """With and without equal logits; NaN counts as the largest."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator)
    logits = ((logits / step).round() * step if step else logits).to(dtype)
    logits[0, torch.rand(size, generator=generator) < 0.01] = torch.nan
    expected = [row.index(max(row)) for row in logits.nan_to_num(torch.inf).tolist()]
    for way in WAYS.values():
        assert way.argmax(logits).tolist() == expected


@pytest.mark.parametrize("size", [SIZE, 700])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parameters", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.5}], ids=str)
def test_nan_logits_still_draw_a_token(size, way, parameters):
    """NaN logits of a faulty model give some token, and do not affect other requests."""
    logits = torch.full((2, size), torch.nan)
    logits[1] = 0.0
    rows = [row_of(SamplingParams(seed=5, **parameters)) for _ in range(2)]
    tokens, _ = sample(logits, rows, way=way)
    assert 0 <= tokens[0] < size
    assert tokens[1] == draw([0.0] * size, SamplingParams(seed=5, **parameters))


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [SIZE, 700])
def test_zero_probability_is_never_drawn(monkeypatch, number, way, size):
    """With the smallest and the largest uniform number; tokens at both ends of the row have
    probability 0."""
    monkeypatch.setattr(
        "services.worker.engine.sampling.draw_plan.uniforms",
        lambda _, positions: torch.full(positions.shape, number, dtype=torch.float64),
    )
    logits = [-1e9] * 3 + [0.0] * (size - 6) + [-1e9] * 3
    for parameters in ({}, {"top_p": 0.99}, {"top_k": size - 2}, {"min_p": 0.001}):
        token = draw(logits, SamplingParams(**parameters), way=way)
        if parameters == {"top_p": 0.99}:
            assert 3 <= token < size - 3
        else:
            assert token == (3 if number == 0 else size - 4)


PENALTIES = st.builds(
    SamplingParams,
    temperature=st.just(0.0),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
)
SEEN = st.lists(st.integers(0, SIZE - 1), min_size=1, max_size=9)


@settings(deadline=None)
@given(st.lists(st.tuples(LOGITS, PENALTIES, SEEN, st.integers(1, 9)), min_size=1, max_size=5))
def test_penalties_of_many_rows_equal_those_of_each(rows):
    """A greedy draw takes the first of the largest logits, penalized token by token."""
    draws = [row_of(s, seen, min(prompt, len(seen))) for _, s, seen, prompt in rows]
    logits = torch.tensor([row[0] for row in rows])
    chosen, _ = sample(logits, draws, [])
    for row, (before, one) in enumerate(zip((r[0] for r in rows), draws, strict=True)):
        after = penalized(before, one)
        assert after[chosen[row]] == max(after)
