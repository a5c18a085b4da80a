"""The search on objectives made by hand: the best is found, bounds are kept, equal seeds agree."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.preset import choose
from simulator.tuning.ranges import SEARCHED, Range, parse_ranges
from simulator.tuning.search import SIDE_VALUES, Setting, search

RANGES = {"a": Range(0.0, 10.0), "b": Range(0.1, 10.0, logarithmic=True), "c": Range(1, 9)}
START = {"a": 9.0, "b": 9.0, "c": 5.0}


def hill(settings: Sequence[Setting]) -> list[float]:
    """Highest at a = 3 and b = 1; c has no effect."""
    return [-((each["a"] - 3) ** 2) - (each["b"] - 1) ** 2 for each in settings]


def test_search_climbs_a_hill_and_finds_which_numbers_matter() -> None:
    found = search(START, RANGES, hill, 120, seed=1)
    assert found.start.score == -(6.0**2) - 8.0**2
    assert abs(found.best.setting["a"] - 3) < 0.5 and abs(found.best.setting["b"] - 1) < 0.5
    changes = {each.key: each.change for each in found.sensitivities}
    assert changes["c"] == 0
    # a = 0, 5 and 10 are 3, 2 and 7 away from the best: the worst is about 49 below it.
    assert changes["a"] == pytest.approx(49, abs=8)
    assert len(found.trials) == 1 + 120 + len(SIDE_VALUES) * len(RANGES)


def test_search_keeps_the_start_where_nothing_is_better() -> None:
    found = search(START, RANGES, lambda settings: [0.0] * len(settings), 20, seed=0)
    assert found.best.setting == START
    assert {each.change for each in found.sensitivities} == {0.0}


def test_search_passes_over_settings_without_a_result() -> None:
    found = search(
        START, RANGES, lambda s: [-inf if each["a"] > 5 else each["a"] for each in s], 60, seed=0
    )
    assert found.start.score == -inf
    assert 3 < found.best.score <= 5


@given(seed=st.integers(0, 1_000), trials=st.integers(1, 30))
def test_search_stays_in_ranges_and_repeats_itself(seed: int, trials: int) -> None:
    found = search(START, RANGES, hill, trials, seed)
    assert found == search(START, RANGES, hill, trials, seed)
    assert found.best.score == max(trial.score for trial in found.trials)
    for trial in found.trials:
        assert all(r.least <= trial.setting[key] <= r.most for key, r in RANGES.items())


def test_search_starts_outside_a_range() -> None:
    found = search({"a": 50.0}, {"a": Range(0.0, 10.0)}, lambda s: [e["a"] for e in s], 8, 0)
    assert found.best.setting == {"a": 50.0}
    assert all(trial.setting["a"] in (50.0,) or trial.setting["a"] <= 10 for trial in found.trials)


@pytest.mark.parametrize(
    ("range_", "values"),
    [
        (Range(0.0, 4.0), (0.0, 2.0, 4.0)),
        (Range(0.01, 1.0, logarithmic=True), (0.01, 0.1, 1.0)),
        (Range(8, 128, logarithmic=True, whole=True), (8, 32, 128)),
    ],
)
def test_range_goes_to_shares_and_back(range_: Range, values: tuple[float, ...]) -> None:
    for share, value in zip((0.0, 0.5, 1.0), values, strict=True):
        assert range_.at(share) == value
        assert range_.share_of(value) == pytest.approx(share)
    assert (range_.share_of(-5), range_.share_of(1e9)) == (0.0, 1.0)


def test_ranges_are_given_ones_or_those_of_the_preset() -> None:
    preset = choose("foretoken")
    assert parse_ranges("decay=0.2:1,slice_tokens", preset, 1) == {
        "decay": Range(0.2, 1.0, logarithmic=True),
        "slice_tokens": SEARCHED["slice_tokens"],
    }
    alone, several = parse_ranges("", preset, 1), parse_ranges("", preset, 2)
    assert set(several) == set(preset.params)
    assert set(several) - set(alone) == {"move_gain", "prefix_weight"}
    for key, range_ in several.items():
        declared = preset.known_params()[key]
        assert declared.least <= range_.least < range_.most <= declared.most


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("decoy=1:2", "unknown key 'decoy', did you mean decay?"),
        ("decay=1", "'decay=1' is not a range; use decay=LEAST:MOST"),
        ("decay=2:1", "LEAST must be less than MOST"),
        ("decay=0:inf", "both finite"),
        ("eviction_share=0:2", r"eviction_share must lie in \[0, 1\], got 0:2"),
        ("slice_tokens=1.5:3", "slice_tokens takes whole numbers"),
        ("decay,decay=1:2", "decay is given twice"),
    ],
)
def test_mistaken_ranges_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_ranges(text, choose("foretoken"), 1)


def test_choices_are_not_tuned() -> None:
    assert "promoted" not in parse_ranges("", choose("ltr"), 1)
    with pytest.raises(ValueError, match="unknown key 'promoted'"):
        parse_ranges("promoted=0:1", choose("ltr"), 1)
