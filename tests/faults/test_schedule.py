"""Properties of every schedule."""

from collections import defaultdict
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.faults import TARGETS, choose_targets
from tests.faults.run import PAUSE_S
from tests.faults.schedule import ENDING, REST_S, SHORTEST_S, Injection, schedule

seeds, longest = st.integers(0, 2**32), st.floats(1.0, 60.0)


def first(seed: int, longest_s: float, count: int = 100) -> list[Injection]:
    return list(islice(schedule(seed, TARGETS, longest_s, PAUSE_S), count))


@given(seeds, longest)
def test_schedule_is_a_function_of_its_seed(seed: int, longest_s: float) -> None:
    assert first(seed, longest_s, 20) == first(seed, longest_s, 20)
    assert first(seed, longest_s, 20) != first(seed + 1, longest_s, 20)


@given(seeds, longest)
def test_first_faults_are_all_kinds(seed: int, longest_s: float) -> None:
    few = first(seed, longest_s, len(TARGETS))
    assert {each.fault for each in few} == set(TARGETS)


@given(seeds, longest)
def test_injections_are_in_order_and_within_bounds(seed: int, longest_s: float) -> None:
    planned = first(seed, longest_s)
    assert all(each.target in TARGETS[each.fault] for each in planned)
    assert all(SHORTEST_S <= each.hold_s <= longest_s * 1.001 for each in planned)
    times = [each.at_s for each in planned]
    assert times == sorted(times)
    assert times[-1] <= len(TARGETS) * len(planned) * 1.8 * PAUSE_S


@given(seeds, longest)
def test_a_target_has_one_fault_at_a_time_and_rests_between_ends(
    seed: int, longest_s: float
) -> None:
    by_target: dict[str, list[Injection]] = defaultdict(list)
    for each in first(seed, longest_s):
        by_target[each.target].append(each)
    for faults in by_target.values():
        for before, after in pairwise(faults):
            assert before.at_s + before.hold_s <= after.at_s
        ends = [each.at_s for each in faults if each.fault in ENDING]
        assert all(a + REST_S <= b for a, b in pairwise(ends))


def test_faults_are_chosen_by_name_and_process():
    workers = [each for each in TARGETS["kill"] if each.startswith("worker")]
    assert choose_targets("kill:worker,kill:gateway,cut:scheduler") == {
        "kill": [*workers, "gateway"],
        "cut": ["scheduler"],
    }
    assert choose_targets("clock_jump:machine") == {"clock_jump": ["machine"]}


@pytest.mark.parametrize("name", ["kil:worker", "kill:workers", "cut:gateway", "kill"])
def test_unknown_fault_is_refused_with_the_known_ones(name: str):
    with pytest.raises(ValueError, match=rf"no fault '{name}'; known: kill:worker, .*half_open:"):
        choose_targets(name)
