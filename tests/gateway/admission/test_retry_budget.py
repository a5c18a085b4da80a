"""The retry budget: allowed retries by submissions and time."""

import pytest

from gateway.admission.retry_budget import WINDOW_S, RetryBudget

T = 1000.0  # an arbitrary time


def count_spent(budget: RetryBudget, tries: int, now_s: float) -> int:
    return sum(budget.try_spend(now_s) for _ in range(tries))


@pytest.mark.parametrize(
    ("share", "floor_per_s", "submitted", "allowed"),
    [
        (0.2, 10.0, 0, 100),  # only the floor, for ten seconds
        (0.2, 0.0, 0, 0),
        (0.2, 0.0, 4, 0),  # 0.8 retries are rounded down
        (0.2, 0.0, 5, 1),
        (0.2, 0.0, 1000, 200),
        (0.2, 10.0, 1000, 300),
        (0.0, 0.3, 1000, 3),
    ],
)
def test_retry_budget_allows_a_share_and_a_floor(
    share: float, floor_per_s: float, submitted: int, allowed: int
) -> None:
    budget = RetryBudget(share, floor_per_s)
    for _ in range(submitted):
        budget.on_submitted(T)
    assert count_spent(budget, 500, T) == allowed


def test_retry_budget_window_moves_on() -> None:
    budget = RetryBudget(0.5, 0.1)  # one, and one for every two submissions
    for at in range(4):
        budget.on_submitted(T + at)
    assert count_spent(budget, 9, T + 4) == 3
    assert count_spent(budget, 9, T + WINDOW_S - 1) == 0  # all three still count
    # The submissions have left the window one by one, the three retries with the fourth second.
    assert count_spent(budget, 9, T + 4 + WINDOW_S) == 1
    budget.on_submitted(T + 5 + WINDOW_S)
    budget.on_submitted(T + 5 + WINDOW_S)
    assert count_spent(budget, 9, T + 5 + WINDOW_S) == 1
    assert count_spent(budget, 9, T + 1000 * WINDOW_S) == 1


def test_retry_budget_memory_is_bounded() -> None:
    budget = RetryBudget(0.2, 10.0)
    for at in range(100_000):
        budget.on_submitted(T + at * 0.01)
    assert count_spent(budget, 10_000, T + 1000) == pytest.approx(100 + 0.2 * 1000, rel=0.06)
    assert len(budget._submitted) <= 21
