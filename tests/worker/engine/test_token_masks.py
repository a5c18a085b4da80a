"""Masks by token id: bias, allowed tokens, bad tokens and early ends, computed by hand and with a
step in flight."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.sampling.draw_plan import Planner
from services.worker.engine.sampling.sampler import Sampler, is_plain
from services.worker.kv.device_streams import ImmediateStreams
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams
from tests.examples import examples
from tests.worker.engine.sampling_oracle import CPU, WAYS, right, row_of, sample
from tests.worker.worker_fixtures import EOS, VOCABULARY, engine_of

FALLING = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]  # token 0 is the end


def draws(output: tuple[int, ...] = (), **how: Any) -> int:
    """Greedy draws after the prompt (2, 3) and this output."""
    row = row_of(SamplingParams(temperature=0, **how), (2, 3, *output), 2)
    return sample(torch.tensor([FALLING]), [row])[0][0]


@pytest.mark.parametrize(
    ("token", "output", "how"),
    [
        (0, (), {}),
        (3, (), {"logit_bias": ((3, 3.5), (4, 3.5))}),
        (1, (), {"logit_bias": ((0, -100.0),)}),
        (2, (), {"allowed_token_ids": (5, 2, 4)}),
        (4, (), {"allowed_token_ids": (5, 2, 4), "logit_bias": ((0, 100.0), (4, 2.5))}),
        (2, (), {"bad_tokens": ((0,), (1,))}),
        # A bad sequence's last token is masked after the others if these are output; the prompt
        # does not count.
        (0, (), {"bad_tokens": ((3, 0),)}),
        (1, (3,), {"bad_tokens": ((3, 0),)}),
        (0, (3, 4), {"bad_tokens": ((3, 0),)}),
        (1, (5, 4, 3), {"bad_tokens": ((4, 3, 0), (5, 4, 0))}),
        (0, (4, 3), {"bad_tokens": ((5, 4, 3, 0),)}),
        (0, (3,), {"bad_tokens": ((2, 3, 0),)}),
        # Two bad sequences with the same last token: the one that does not match removes no mask.
        (1, (3,), {"bad_tokens": ((3, 0), (4, 0))}),
        (1, (3,), {"bad_tokens": ((4, 0), (3, 0), (5, 0), (4, 1))}),
        # Neither an end of the model nor a stop token of the request comes before min_tokens.
        (2, (), {"min_tokens": 1, "stop_token_ids": (1,)}),
        (2, (), {"min_tokens": 1, "stop_token_ids": (1, EOS), "ignore_eos": True}),
        (0, (5,), {"min_tokens": 1, "stop_token_ids": (1,)}),
        # An allowed token is drawn even if all allowed tokens are masked.
        (4, (), {"allowed_token_ids": (4,), "bad_tokens": ((4,),)}),
        (0, (), {"allowed_token_ids": (0,), "min_tokens": 1}),
        (5, (), {"allowed_token_ids": (0, 5), "min_tokens": 1}),
        # Penalties apply after masks: 8 / 1.25 is 6.4, and 7 / 1.25 is 5.6.
        (3, (1, 2), {"bad_tokens": ((0,),), "repetition_penalty": 1.25, "logit_bias": ((3, 2.1),)}),
    ],
)
def test_token_masks_table(token, output, how):
    assert draws(output, **how) == token


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.9}, {"temperature": 1e-4}], ids=str)
def test_masked_tokens_are_never_sampled(way, how):
    """Two of 300 tokens are allowed, and one of them is masked; then both are."""
    logits = torch.zeros(50, 300)
    for bad, drawn in (((7,),), {250}), (((7,), (250,)), {7, 250}):
        rows = [
            row_of(SamplingParams(seed=seed, allowed_token_ids=(7, 250), bad_tokens=bad, **how))
            for seed in range(50)
        ]
        assert set(sample(logits, rows, way=way)[0]) == drawn


def test_logprobs_ignore_masks():
    how: dict[str, Any] = {
        "logit_bias": ((5, 9.0),),
        "bad_tokens": ((0,),),
        "allowed_token_ids": (0, 5),
    }
    row = row_of(SamplingParams(temperature=0, logprobs=1, **how))
    tokens, logprobs = sample(torch.tensor([FALLING]), [row])
    raw = torch.tensor(FALLING).log_softmax(-1).tolist()
    assert tokens == [5] and logprobs[0].top_ids == (0,)
    assert (logprobs[0].chosen, *logprobs[0].top) == pytest.approx((raw[5], raw[0]))


@pytest.mark.parametrize(
    ("plain", "how"),
    [
        (True, {"stop_token_ids": (3,)}),
        (True, {"prompt_logprobs": 3}),
        (False, {"logit_bias": ((3, 0.0),)}),
        (False, {"allowed_token_ids": (3,)}),
        (False, {"bad_tokens": ((3,),)}),
    ],
)
def test_only_masks_prevent_plain_argmax(plain, how):
    assert is_plain(SamplingParams(temperature=0, **how)) is plain


SIZE = 6
BAD = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=12)


@settings(deadline=None, max_examples=examples(80))
@given(
    st.lists(BAD.map(tuple), min_size=4, max_size=4),
    st.lists(st.permutations(range(4)).flatmap(
        lambda order: st.integers(1, 4).map(lambda count: order[:count])
    ), min_size=2, max_size=10),
    st.sampled_from(list(WAYS)),
)  # fmt: skip
def test_bad_words_follow_tokens_known_only_on_the_device(bads, batches, way):
    """The device is one step ahead of the host, and batches change: each step reads the tokens of
    the one before."""
    sampler = Sampler(CPU, SIZE, [EOS], WAYS[way], ImmediateStreams())
    rows = [row_of(SamplingParams(seed=i, bad_tokens=bad)) for i, bad in enumerate(bads)]
    flights: list[Any] = []
    for number, places in enumerate(batches):
        batch = [rows[place] for place in places]
        logits = torch.randn(len(batch), SIZE, generator=torch.Generator().manual_seed(number))
        drawn = sampler.draw(batch, logits)
        learn(flights)
        flights.append((batch, logits, drawn))
        for place, row in enumerate(batch):
            row.tokens.append(-1)
            row.sampling_row = place
    learn(flights)


def learn(flights: list[Any]) -> None:
    """The host receives the tokens of the oldest step in flight, and checks them."""
    if not flights:
        return
    batch, logits, drawn = flights.pop()
    tokens, _ = drawn.to_host()
    for row, own, token in zip(batch, logits.tolist(), tokens, strict=True):
        row.tokens.pop()
        assert token in right(own, row)
        row.tokens.append(token)
        row.sampling_row = -1


def test_mask_with_an_unknown_foreign_token_is_an_error():
    row = row_of(SamplingParams(bad_tokens=((1, 2),)))
    row.tokens.append(-1)
    sampler = Sampler(CPU, SIZE, [EOS], WAYS["numba"], ImmediateStreams())
    with pytest.raises(ValueError, match="newest token of r was not drawn here"):
        sampler.draw([row], torch.zeros(1, SIZE))


def test_steady_masked_batch_copies_nothing(monkeypatch):
    sent: list[int] = []
    tensor = Planner._tensor

    def noted(planner: Planner, array: Any) -> Any:
        sent.append(array.size)
        return tensor(planner, array)

    monkeypatch.setattr(Planner, "_tensor", noted)
    masked = SamplingParams(
        bad_tokens=((1,), (2, 3)), logit_bias=((1, 2.0),), allowed_token_ids=(1, 2, 3), min_tokens=2
    )
    rows = [row_of(masked), row_of(GREEDY)]
    sampler = Sampler(CPU, SIZE, [EOS], WAYS["numba"], ImmediateStreams())
    for step in range(5):
        tokens, _ = sampler.draw(rows, torch.zeros(2, SIZE)).to_host()
        assert bool(sent) == (step == 0)
        sent.clear()
        for row, token in zip(rows, tokens, strict=True):
            row.tokens.append(token)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 31, 32, 33, 96, 200])
def test_bits_mask_tokens_of_their_rows(way, size):
    """Words that allow all, none and some of their tokens; there may be more than the vocabulary
    needs."""
    random = np.random.default_rng(size)
    logits = torch.from_numpy(random.normal(size=(5, size)).astype(np.float32))
    allowed = random.random((3, 224)) < 0.5
    allowed[0], allowed[1, :64] = True, False
    words = np.packbits(allowed, -1, bitorder="little").view(np.int32)
    rows, expected = [4, 0, 3], logits.clone()
    for row, mask in zip(rows, allowed, strict=True):
        expected[row][~torch.from_numpy(mask[:size])] = -torch.inf
    WAYS[way].mask_tokens(logits, torch.tensor(rows), torch.from_numpy(words))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("field", "ids"),
    [
        ("stop_token_ids", (1, VOCABULARY)),
        ("logit_bias", ((VOCABULARY, 1.0),)),
        ("allowed_token_ids", (-1,)),
        ("bad_tokens", ((1,), (2, 10**9))),
    ],
)
def test_out_of_vocabulary_ids_name_their_field(field, ids):
    """No request can fail a step that other requests are in."""
    engine = engine_of("llama")
    prompt = Prompt("r", (1, 2), 2, 3, SamplingParams(**{field: ids}))
    assert engine.add(prompt, 0.0) == f"{field} must lie in [0, {VOCABULARY})"
    last = SamplingParams(stop_token_ids=(VOCABULARY - 1,), bad_tokens=((0, VOCABULARY - 1),))
    assert engine.add(replace(prompt, sampling=last), 0.0) is None
