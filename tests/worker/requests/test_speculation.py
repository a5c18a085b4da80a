"""Drafts by prompt lookup: what is proposed, accepted, and given back. The machine of
test_random.py drafts, too, among plans, evictions and swaps."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import FinishReason, Grant, Plan, StaticBatch
from services.worker.requests.speculation import may_draft
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import NewToken, StepBatch
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.lookup import MAX_EXAMINED, DraftLimits, PromptLookup
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams

EOS = 0


# The lookup


def naive_draft(tokens: list[int], limits: DraftLimits, most: int) -> list[int]:
    """By comparing every earlier place, the latest MAX_EXAMINED with the shortest match counting.
    The copied text grows with the draft."""
    end, best, found, examined = len(tokens), limits.shortest - 1, 0, 0
    for at in range(end - 1, limits.shortest - 1, -1):
        matched = 0
        while (
            matched < min(at, limits.longest)
            and tokens[at - 1 - matched] == (tokens[end - 1 - matched])
        ):
            matched += 1
        if matched >= limits.shortest and examined < MAX_EXAMINED:
            examined += 1
            if matched > best:
                best, found = matched, at
    text = list(tokens)
    for place in range(found, found + most) if found else ():
        text.append(text[place])
    return text[end:]


@given(st.data())
def test_lookup_drafts_what_followed_the_longest_match(data):
    """Against a naive search, while the text grows by one to four tokens. Of tokens as large as
    these, no two n-grams have the same hash by accident."""
    shortest = data.draw(st.integers(1, 3))
    limits = DraftLimits(data.draw(st.integers(1, 5)), shortest, shortest + 2)
    token = st.sampled_from([1, 2, 3, 150_000])
    tokens = data.draw(st.lists(token, max_size=40))
    lookup = PromptLookup(limits)
    for _ in range(data.draw(st.integers(1, 30))):
        most = data.draw(st.integers(0, 6))
        assert lookup.propose(tokens, most) == naive_draft(tokens, limits, min(most, limits.most))
        tokens += data.draw(st.lists(token, min_size=1, max_size=4))


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([], []),
        ([5, 6], []),
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5]),
        ([1, 5, 6, 7, 2, 5, 6, 8, 1, 5, 6], [7, 2, 5, 6]),  # the longer match is earlier
        ([5, 6, 7, 2, 5, 6, 8, 5, 6], [8, 5, 6, 8]),  # the later one of equal matches
        ([4, 4, 4], [4, 4, 4, 4]),  # a draft goes on with its own beginning
    ],
)
def test_lookup_of_texts_worked_by_hand(tokens, draft):
    assert PromptLookup(DraftLimits(4, 2, 3)).propose(tokens, 9) == draft


def test_lookup_index_built_at_once_equals_one_that_grew():
    tokens = [(7 * i * i) % 23 for i in range(700)]
    grown = PromptLookup(DraftLimits(4, 2, 6))
    for end in range(700):
        grown.propose(tokens[:end], 4)
    assert grown.propose(tokens, 4) == PromptLookup(DraftLimits(4, 2, 6)).propose(tokens, 4)


def test_lookup_drafts_as_much_as_was_accepted_and_doubles_after_success():
    lookup = PromptLookup(DraftLimits(8, 1, 1))
    lengths = []
    for drafted, accepted in ((8, 3), (3, 0), (1, 0), (1, 1), (2, 2), (4, 4), (8, 8)):
        lookup.record(drafted, accepted)
        lengths.append(lookup.most)
    assert lengths == [3, 1, 1, 2, 4, 8, 8]


@pytest.mark.parametrize(
    ("sampling", "drafts"),
    [
        (GREEDY, True),
        (SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, seed=3), True),
        (SamplingParams(logit_bias=((3, 1.0),), allowed_token_ids=(3, 4), min_tokens=4), True),
        (SamplingParams(logprobs=2, stop_token_ids=(3,)), True),
        (SamplingParams(repetition_penalty=1.1), False),
        (SamplingParams(presence_penalty=0.1), False),
        (SamplingParams(frequency_penalty=0.1), False),
        (SamplingParams(bad_tokens=((3, 4),)), False),
    ],
)
def test_requests_draft_unless_a_draw_depends_on_the_tokens_before_it(sampling, drafts):
    assert may_draft(sampling) == drafts


# Steps


class Counting:
    """A worker with a model that always continues 1 2 3 4 5 6 7 1 2 …, except at `wrong` lengths:
    there it draws `other`."""

    def __init__(self, blocks: int = 20, most: int = 4, batch_tokens: int = 64, running: int = 8):
        limits = Limits(
            blocks, 4, running, batch_tokens, eos_ids=frozenset([EOS]),
            drafts=DraftLimits(most, 2, 4),
        )  # fmt: skip
        self.state = WorkerState(limits)
        self.wrong: dict[int, int] = {}
        self.seq = 0

    def add(
        self, name: str, length: int, most: int, limit: int = 0, salt: str = "", **sampling: Any
    ) -> None:
        tokens = tuple(1 + i % 7 for i in range(length))
        params = SamplingParams(temperature=0, **sampling)
        prompt = Prompt(name, tokens, length, most, params, cache_salt=salt)
        assert self.state.receive(prompt, 0.0) is None
        self.plan(admit=(Grant(name, limit or most),))

    def plan(self, **directives: Any) -> None:
        self.seq += 1
        self.state.apply_plan(Plan(self.seq, **directives), 0.0)

    def compose(self) -> StepBatch:
        batch = self.state.steps.compose()
        assert batch is not None
        return batch

    def commit(self, batch: StepBatch) -> list[NewToken]:
        sequences, ahead = batch.draws
        more = [0] * len(sequences) if ahead is None else ahead.tolist()
        lengths = [len(s.tokens) + n for s, n in zip(sequences, more, strict=True)]
        drawn = [self.wrong.get(length, 1 + length % 7) for length in lengths]
        result = self.state.steps.commit(batch, drawn, [])
        self.state.check_integrity()
        return result.tokens

    def step(self) -> list[NewToken]:
        return self.commit(self.compose())


def ids(tokens: list[NewToken]) -> list[int]:
    return [token.token_id for token in tokens]


def test_step_sends_every_accepted_token_and_the_one_after_them():
    worker = Counting()
    worker.add("r", 9, 30)
    assert ids(worker.step()) == [3], "the prefill"
    tokens = worker.step()
    assert ids(tokens) == [4, 5, 6, 7, 1]
    assert [token.offset for token in tokens] == [1, 2, 3, 4, 5]
    sequence = worker.state.sequences["r"]
    assert sequence.computed == len(sequence.tokens) - 1 == 14
    assert worker.state.pool.held() == {"r": 4}
    counters = worker.state.counters
    assert (counters.drafts, counters.draft_tokens, counters.accepted_tokens) == (1, 4, 4)


def test_first_token_that_differs_from_the_draft_is_the_last_of_the_step():
    worker = Counting()
    worker.add("r", 9, 30)
    worker.step()
    worker.wrong = {12: 7}  # the third token of this step
    assert ids(worker.step()) == [4, 5, 7]
    assert worker.state.counters.accepted_tokens == 2
    worker.wrong = {}
    assert ids(worker.step()) == [7], "nothing before was like it"
    assert worker.state.pool.held() == {"r": 4}


@pytest.mark.parametrize(
    ("wrong", "sampling", "expected", "reason"),
    [
        ({11: EOS}, {}, [4, EOS], FinishReason.STOP),
        ({}, {"stop_token_ids": (6,)}, [4, 5, 6], FinishReason.STOP),
        ({}, {"most": 4}, [4, 5, 6], FinishReason.LENGTH),
        ({}, {"stop_token_ids": (6,), "min_tokens": 4}, [4, 5, 6, 7, 1], None),
    ],
)
def test_answer_ends_in_the_middle_of_a_draft(wrong, sampling, expected, reason):
    worker = Counting()
    worker.add("r", 9, **{"most": 30, **sampling})
    worker.step()
    worker.wrong = wrong
    tokens = worker.step()
    assert ids(tokens) == expected
    assert [token.finish for token in tokens] == [None] * (len(tokens) - 1) + [reason]
    assert ("r" in worker.state.sequences) == (reason is None)
    report = worker.state.report()
    assert report is not None
    if reason:
        assert [done.output_tokens for done in report.finished] == [1 + len(expected)]
        assert worker.state.pool.free_blocks == worker.state.pool.blocks


def test_budget_is_used_up_and_not_exceeded():
    worker = Counting()
    worker.add("r", 9, 30, limit=4)
    worker.step()
    assert ids(worker.step()) == [4, 5, 6]
    assert worker.state.steps.compose() is None
    worker.plan(extend=(Grant("r", 6),))
    assert ids(worker.step()) == [7, 1]


def test_drafts_take_the_rest_of_a_step():
    worker = Counting(batch_tokens=5)
    for name in ("a", "b"):
        worker.add(name, 9, 30)
        while not worker.state.sequences[name].is_decode:
            worker.step()
    batch = worker.compose()
    assert sum(chunk.tokens for chunk in batch.chunks) + len(batch.decodes) == 5
    assert [len(chunk.drafts) for chunk in batch.drafted] == [3]


def test_drafts_take_only_blank_blocks():
    """Two blocks of a finished prompt stay cached, although a longer draft could use them."""
    worker = Counting(blocks=5)
    worker.add("old", 9, 1)
    worker.step()
    worker.add("new", 9, 11, salt="another text")
    worker.step()
    pool = worker.state.pool
    assert (pool.cached_blocks, pool.blank_blocks) == (2, 0)
    batch = worker.compose()
    assert [len(chunk.drafts) for chunk in batch.drafted] == [2], "up to the end of the third block"
    assert ids(worker.commit(batch)) == [4, 5, 6]
    assert pool.cached_blocks == 2


def test_failed_step_gives_back_the_blocks_of_its_drafts():
    worker = Counting()
    for name in ("a", "b"):
        worker.add(name, 8, 30)
    worker.step()
    worker.step()
    held = worker.state.pool.held()
    batch = worker.compose()
    assert len(batch.drafted) == 2
    assert worker.state.steps.fail(batch) == []
    worker.state.check_integrity()
    assert all(held[name] >= count for name, count in worker.state.pool.held().items())
    parts = [worker.compose()]
    assert not parts[0].drafted, "parts of a failed step are computed without drafts"
    assert ids(worker.commit(parts[0])) and ids(worker.step())
    assert worker.compose().drafted


def test_members_of_a_static_batch_draft_nothing():
    worker = Counting()
    worker.add("a", 9, 30)
    worker.add("b", 9, 30)
    worker.plan(batches=(StaticBatch(1, ("a", "b")),))
    for _ in range(4):
        batch = worker.compose()
        assert not batch.drafted
        worker.commit(batch)


@pytest.mark.parametrize(("rows", "drafted"), [(8, 1), (9, 0)])
def test_few_drafts_beside_many_rows_are_left_out(rows, drafted):
    """All requests but one have a penalty."""
    worker = Counting(blocks=60, most=1, running=rows)
    for number in range(rows):
        worker.add(f"r{number}", 9, 30, frequency_penalty=0.1 * (number > 0))
    while not all(s.is_decode for s in worker.state.sequences.values()):
        worker.step()
    batch = worker.compose()
    assert (batch.decoding, len(batch.drafted)) == (rows, drafted)


def test_report_has_the_mean_of_tokens_per_step():
    worker = Counting()
    worker.add("r", 9, 60)
    while "r" in worker.state.sequences:
        worker.step()
    report = worker.state.report()
    assert report is not None and 1 < report.tokens_per_step < 5
    worker.state.reset()
    worker.add("r", 2, 1)
    worker.step()
    report = worker.state.report()
    assert report is not None and report.tokens_per_step == 1


def test_profiled_steps_have_no_drafts():
    worker = Counting()
    with worker.state.without_drafts():
        worker.seq = 0
        worker.add("r", 9, 30)
        worker.step()
        assert not worker.compose().drafted
    worker.seq = 0
    worker.add("r", 9, 30)
    worker.step()
    assert worker.compose().drafted
