"""State that the sampler keeps between steps: it changes no answer, is bounded, and costs nothing
while the same sequences draw."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.core import StaticBatch
from services.worker.engine.sampling.draw_plan import Planner
from services.worker.engine.sampling.sampler import Sampler
from services.worker.engine.sampling.seen_tokens import FEWEST_ROWS, STEP, SeenTokens
from services.worker.kv.device_streams import ImmediateStreams, Lane
from services.worker.requests.types.prompt import GREEDY, SamplingParams
from services.worker.requests.types.sequence import Sequence
from tests.examples import examples
from tests.worker.engine.sampling_oracle import CPU, WAYS, right, row_of, sample
from tests.worker.kv.deferred_streams import DeferredStreams
from tests.worker.worker_fixtures import EOS, VOCABULARY, Feeder, engine_of, prompt_tokens

SIZE = 300  # more than two blocks, and not a multiple of one
PAIRS = tuple((a, b) for a in range(VOCABULARY) for b in range(a % 10, VOCABULARY, 10))
EVERYTHING = SamplingParams(
    temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=7, min_tokens=5,
    repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logprobs=3,
    stop_token_ids=(3,), logit_bias=((5, 2.0), (6, -4.0)), bad_tokens=((9,), *PAIRS),
)  # fmt: skip


def sampler_of(size: int = SIZE, way: str = "numba") -> Sampler:
    return Sampler(CPU, size, [EOS], WAYS[way], ImmediateStreams())


def logits_of(seed: int, rows: int, size: int = SIZE) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 2


def again(row: Sequence) -> Sequence:
    """The same request at another worker, or at this one again."""
    return row_of(row.prompt.sampling, tuple(row.tokens), row.prompt_tokens, row.request_id)


FEW = st.integers(0, 7)  # tokens that the logits below favour, so that sequences of them occur
MASKS: dict[str, st.SearchStrategy[Any]] = {
    "stop_token_ids": st.sampled_from([(), (), (3, 4)]),
    "logit_bias": st.dictionaries(FEW, st.sampled_from([-100.0, -2.5, 0.5, 8.0]), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    "allowed_token_ids": st.one_of(
        st.just(()), st.just(()), st.lists(FEW, min_size=1, max_size=5).map(tuple)
    ),
    "bad_tokens": st.one_of(
        st.just(()),
        st.lists(st.lists(FEW, min_size=1, max_size=3).map(tuple), max_size=9).map(tuple),
    ),
}
PARAMETERS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.6, 0.95]),
    top_k=st.sampled_from([0, 0, 4, 40]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=st.sampled_from([0, 0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.4, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.8, -0.5]),
    **MASKS,
)
STARTS = st.tuples(
    PARAMETERS, st.lists(st.one_of(FEW, st.integers(0, SIZE - 1)), min_size=1, max_size=5)
)
# A step: its rows, whether it is committed, and rows that are new objects since.
EVENTS = st.tuples(
    st.sampled_from(["counts", "counts", "counts", "fails"]),
    st.permutations(range(5)),
    st.integers(1, 5),
    st.sets(st.integers(0, 4), max_size=1),
)


@settings(deadline=None, max_examples=examples(50))
@given(
    st.lists(STARTS, min_size=5, max_size=5),
    st.lists(EVENTS, min_size=1, max_size=12),
    st.sampled_from(list(WAYS)),
)
def test_draws_do_not_depend_on_the_order_of_steps(starts, events, way):
    """Rows arrive, leave and change places, steps fail, requests move: each token is that of the
    oracle for the request's tokens."""
    rows = [row_of(sampling, tokens) for sampling, tokens in starts]
    sampler = sampler_of(way=way)
    for number, (outcome, order, count, moved) in enumerate(events):
        rows = [again(row) if i in moved else row for i, row in enumerate(rows)]
        batch = [rows[i] for i in order[:count]]
        logits = logits_of(number, count)
        logits[:, :8] += 4
        tokens, _ = sampler.draw(batch, logits).to_host()
        for token, row, own in zip(tokens, batch, logits.tolist(), strict=True):
            assert token in right(own, row)
            if outcome == "counts":
                row.tokens.append(token)


@pytest.mark.parametrize("way", WAYS)
def test_token_counts_as_seen_before_the_host_knows_it(way):
    """With two steps in flight, the second one is drawn while the tokens of the first are only on
    the device."""
    parameters = [replace(EVERYTHING, seed=seed, logprobs=None) for seed in range(3)]
    parameters[1] = SamplingParams(temperature=1.0, seed=4)
    ahead = [row_of(sampling, (2, 3, 4)) for sampling in parameters]
    known = [row_of(sampling, (2, 3, 4)) for sampling in parameters]
    first, second = sampler_of(way=way), sampler_of(way=way)
    drawn = first.draw(ahead, logits_of(0, 3))
    for step in range(1, 2 * STEP):  # the later columns, too
        for row in ahead:
            row.tokens.append(-1)
        following = first.draw(ahead, logits_of(step, 3))
        tokens, _ = drawn.to_host()
        assert tokens == drawn.tokens.tolist()
        expected, _ = second.draw(known, logits_of(step - 1, 3)).to_host()
        assert tokens == expected
        for row, other, token in zip(ahead, known, tokens, strict=True):
            row.tokens[-1] = token
            other.tokens.append(token)
        drawn = following


def test_host_waits_for_the_draw_and_not_for_later_launches():
    """The host waits for one event after the copies."""
    streams = DeferredStreams(Random(0), haste=(0.0,))
    sampler = Sampler(CPU, SIZE, [EOS], WAYS["numba"], streams)
    done: list[str] = []
    streams.issue(Lane.COMPUTE, "forward", lambda: done.append("this step"))
    drawn = sampler.draw([row_of(EVERYTHING)], logits_of(0, 1))
    streams.issue(Lane.COMPUTE, "forward", lambda: done.append("the next"))
    assert done == []
    drawn.to_host()
    assert done == ["this step"]


def test_unknown_token_of_another_sampler_is_an_error():
    row = row_of(SamplingParams(temperature=0, presence_penalty=1.0))
    row.tokens.append(-1)
    with pytest.raises(ValueError, match="newest token of r was not drawn here"):
        sampler_of().draw([row], logits_of(0, 1))


def test_failed_draw_counts_nothing(monkeypatch):
    """The device may have counted a token that was not delivered: the counts are rebuilt from the
    request's tokens."""
    size = 8
    counts = SamplingParams(frequency_penalty=1.0, logprobs=1)
    rows = [row_of(replace(counts, seed=seed), (5, 6)) for seed in range(3)]
    sampler = sampler_of(size)
    for step in range(30):
        logits = logits_of(step, 3, size)
        if step % 3:
            with monkeypatch.context() as broken:
                broken.setattr(Tensor, ("add_", "index_add_")[step % 3 - 1], _raise)
                with pytest.raises(MemoryError):
                    sampler.draw(rows, logits)
        tokens, logprobs = sampler.draw(rows, logits).to_host()
        expected = sample(logits, [again(row) for row in rows])
        assert (tokens, logprobs) == expected
        for row, token in zip(rows, tokens, strict=True):
            row.tokens.append(token)


def _raise(*_: Any) -> Any:
    raise MemoryError


def test_steady_batch_builds_no_index_and_copies_nothing(monkeypatch):
    made: list[int] = []
    tensor = Planner._tensor

    def noted(planner: Planner, array: Any) -> Tensor:
        made.append(array.size)
        return tensor(planner, array)

    monkeypatch.setattr(Planner, "_tensor", noted)
    built: list[int] = []
    build = SeenTokens._build

    def noted_build(seen: SeenTokens, row: int, sequence: Sequence) -> None:
        built.append(row)
        build(seen, row, sequence)

    monkeypatch.setattr(SeenTokens, "_build", noted_build)
    rows = [row_of(sampling) for sampling in (EVERYTHING, GREEDY, SamplingParams(top_p=0.5))]
    sampler = sampler_of()

    def step(batch: list[Sequence]) -> tuple[bool, list[int]]:
        made.clear()
        built.clear()
        tokens, _ = sampler.draw(batch, logits_of(0, len(batch))).to_host()
        for row, token in zip(batch, tokens, strict=True):
            row.tokens.append(token)
        return bool(made), list(built)

    assert step(rows) == (True, [0])
    for _ in range(STEP):
        assert step(list(rows)) == (False, [])  # another list of the same sequences
    assert step(rows[:2]) == (True, [])  # a continuing row is not counted again
    assert step(rows) == (True, [])


def test_seen_token_rows_are_bounded_and_reused():
    sampler = sampler_of()
    penalized = SamplingParams(temperature=0, frequency_penalty=1.0)
    assert sampler.seen.capacity == 0
    stays = row_of(penalized, name="stays")
    for number in range(100):
        batch = [stays, *(row_of(penalized, (number,), name=f"{number}.{i}") for i in range(4))]
        logits = logits_of(number, 5)
        tokens, _ = sampler.draw(batch, logits).to_host()
        assert tokens == [
            right(own, row).pop() for own, row in zip(logits.tolist(), batch, strict=True)
        ]
        stays.tokens.append(tokens[0])
    assert len(sampler.seen) == sampler.seen.capacity == FEWEST_ROWS
    crowd = [row_of(penalized, name=str(i)) for i in range(33)]
    sampler.draw(crowd, logits_of(0, 33))
    assert sampler.seen.capacity == 64
    sampler.clear()
    assert len(sampler.seen) == 0


def test_requests_without_penalties_use_no_row():
    sampler = sampler_of()
    for number in range(20):
        row = row_of(SamplingParams(seed=number, top_p=0.9, logprobs=2, min_tokens=3))
        sampler.draw([row], logits_of(number, 1))
    assert sampler.seen.capacity == 0


def test_request_may_have_seen_every_token():
    """The number of columns is that of distinct tokens, for any length of the answer."""
    size = STEP + 1
    row = row_of(SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0), (0,))
    sampler = Sampler(CPU, size, [], WAYS["numba"], ImmediateStreams())
    flat = [0.01 * i for i in range(size)]
    for _ in range(3 * size):
        tokens, _ = sampler.draw([row], torch.tensor([flat])).to_host()
        assert tokens[0] in right(flat, row, [])
        row.tokens.append(tokens[0])
    counts = np.bincount(row.tokens[1:], minlength=size)
    assert counts.min() == counts.max() == 3


def test_logprobs_are_those_of_the_requesting_rows():
    rows = [row_of(replace(GREEDY, logprobs=n)) for n in (None, 0, 20, None, 2)]
    logits = logits_of(3, 5)
    tokens, logprobs = sampler_of().draw(rows, logits).to_host()
    assert tokens == logits.argmax(-1).tolist()
    raw = logits.log_softmax(-1)
    assert sorted(logprobs) == [1, 2, 4]
    for row, count in ((1, 0), (2, 20), (4, 2)):
        best = raw[row].topk(count)
        assert logprobs[row].chosen == pytest.approx(float(raw[row, tokens[row]]))
        assert logprobs[row].top_ids == tuple(best.indices.tolist())
        assert logprobs[row].top == pytest.approx(tuple(best.values.tolist()))


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_answers_with_all_options_survive_eviction_and_resumption(overlap):
    """Memory is short: requests are evicted during their answers and recomputed in other batches,
    or are members of a static batch with padding."""
    some: dict[str, Any] = {
        "bad_tokens": tuple(pair for pair in PAIRS if pair[1] < 30),
        "prompt_logprobs": 2,
    }
    mixed = (
        EVERYTHING,
        replace(EVERYTHING, top_k=9, allowed_token_ids=tuple(range(30)), ignore_eos=True),
        replace(GREEDY, allowed_token_ids=tuple(range(2, 30)), **some),
        replace(GREEDY, repetition_penalty=1.3, stop_token_ids=tuple(range(20)), **some),
    )
    requests = {
        f"r{i}": (prompt_tokens(i, 4 + 3 * i), replace(mixed[i % 4], seed=i)) for i in range(8)
    }
    roomy, static = (Feeder(engine_of("llama", overlap=overlap)) for _ in range(2))
    small = engine_of("llama", kv_tokens=96, block_tokens=4, max_batch_tokens=9, overlap=overlap)
    narrow = Feeder(small)
    for feeder in (roomy, static, narrow):
        for request_id, (tokens, sampling) in requests.items():
            feeder.add(request_id, tokens, 24, sampling)
    static.plan(batches=(StaticBatch(1, tuple(requests)),))
    expected: dict[str, list[int]] = {}
    for request_id, (tokens, sampling) in requests.items():
        alone = Feeder(engine_of("llama"))
        alone.add(request_id, tokens, 24, sampling)
        expected |= alone.run()
    assert roomy.run() == narrow.run() == static.run() == expected
    assert narrow.evictions > 0 and static.engine.state.counters.padding_tokens > 0
    assert len({len(answer) for answer in expected.values()}) > 2, "some requests end by a stop"
    assert all(min(token) >= 0 and max(token) < VOCABULARY for token in expected.values())


@pytest.mark.parametrize("size", [12, SIZE])
def test_step_that_completes_no_prompt_draws_nothing(size):
    assert sampler_of(size).draw([], torch.zeros(0, size)).to_host() == ([], {})
