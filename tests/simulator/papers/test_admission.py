"""The output lengths that an admission receives, and the queue in front of it."""

import numpy as np
import pytest

from simulator.papers.past_future.admission import Admission, Foresight, Rules, Settings
from simulator.papers.past_future.queue import Queue
from simulator.papers.past_future.table1 import DATASETS, draw_burst
from simulator.workload.builtin import LENGTHS
from simulator.workload.workload import Workload

NONE = np.zeros(0, np.int64)
PAST_FUTURE = Rules("past_future", {"reserved": 0.0, "draws": 3, "statistic": 1})
TRUE = Rules("past_future", {"reserved": 0.0, "draws": 1}, Foresight.TRUE_LENGTHS)
CONSERVATIVE = Rules("conservative", {}, Foresight.MAX_TOKENS)
AGGRESSIVE = Rules("aggressive", {"watermark": 1.0}, Foresight.MAX_TOKENS)


def equal_requests(count: int, prompt: int = 30, output: int = 5) -> Workload:
    inputs, outputs = np.full(count, prompt), np.full(count, output)
    return Workload("equal", np.zeros(count), inputs, outputs)


def admitted(rules: Rules, kv_tokens: int, learned: int = 0) -> int:
    """How many requests of 30 + 5 tokens, with max_tokens 20, start together after `learned` of
    them have ended."""
    requests = equal_requests(40)
    settings = Settings(kv_tokens, max_tokens=20, window=10, prior=4)
    admission = Admission(requests, rules, settings, np.random.default_rng(0))
    admission.learn(np.arange(learned))
    return admission.admit(NONE, 0, Queue(admission.jobs)).count


@pytest.mark.parametrize(
    ("rules", "each"),
    [
        (AGGRESSIVE, 29),  # prompt − 1
        (TRUE, 34),  # prompt + output − 1
        (PAST_FUTURE, 49),  # prompt + max_tokens − 1: the history is all max_tokens
        (CONSERVATIVE, 50),  # prompt + max_tokens
    ],
)
def test_admission_counts_the_tokens_that_its_policy_expects(rules: Rules, each: int) -> None:
    assert admitted(rules, 3 * each) == 3
    assert admitted(rules, 3 * each - 1) == 2


@pytest.mark.parametrize(
    ("rules", "each"),
    [
        (Rules("curve", {"z": 0.0, "eviction_share": 0.0}), 49),  # certain lengths: M*
        (Rules("curve", {"z": 2.0, "eviction_share": 0.0}), 49),  # they have no variance
        (Rules("curve", {"z": 0.0, "eviction_share": 0.0}, slice_tokens=8), 37),  # 29 + a slice
    ],
)
def test_curve_admission_covers_the_peak_or_the_slice(rules: Rules, each: int) -> None:
    """All requests have the same forecast, 20 tokens: memory is largest when all end, or where
    their slices do."""
    assert admitted(rules, 3 * each) == 3
    assert admitted(rules, 3 * each - 1) == 2


def test_ended_lengths_replace_prior_entries() -> None:
    """Ten ended requests fill the window; each of the next is expected to have their length."""
    assert admitted(PAST_FUTURE, 3 * 34, learned=10) == 3
    assert admitted(PAST_FUTURE, 3 * 34, learned=0) == 2


def test_queue_returns_latest_evicted_request_first() -> None:
    jobs = Admission(equal_requests(4), TRUE, Settings(1_000), np.random.default_rng(0)).jobs
    queue = Queue(jobs)
    assert queue.pop(3).tolist() == [0, 1, 2]
    queue.put_back(2)
    queue.put_back(1)
    assert queue.head(58).tolist() == [1, 2, 3]  # 29 tokens each, and one more request
    assert queue.pop(3).tolist() == [1, 2, 3]
    assert len(queue) == 0
    assert queue.head(100).tolist() == []


@pytest.mark.parametrize("name", DATASETS)
def test_burst_has_lengths_of_its_distribution(name: str) -> None:
    drawn, again = draw_burst(name, 4_000, 3), draw_burst(name, 4_000, 3)
    of = LENGTHS[name.lower()]
    for column, (least, most) in (
        (drawn.input_tokens, of.input_tokens),
        (drawn.output_tokens, of.output_tokens),
    ):
        assert least <= column.min() and column.max() <= most
        assert abs(column.mean() - (least + most) / 2) < (most - least) / 50
    assert np.array_equal(drawn.output_tokens, again.output_tokens)
    assert not np.array_equal(drawn.output_tokens, draw_burst(name, 4_000, 4).output_tokens)
