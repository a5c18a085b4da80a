"""presets.toml: every row stands whole, and a choice replaced is a choice checked."""

import pytest
from services.batcher.policies import resolve
from services.scheduler.order import ORDERS
from services.scheduler.placement import PLACEMENTS
from services.scheduler.preemption import PREEMPTIONS
from services.policies.preset import RESIDENCIES, Preset, choose, presets
from services.scheduler.victims import VICTIMS

from services.scheduler.state import SchedulerState
from services.worker.residency import RESIDENCIES as WORKER_RESIDENCIES

ALISE = {"levels": 8, "base_s": 0.02, "ageing_s": 10, "hysteresis": 0.25}


@pytest.mark.parametrize("name", presets())
def test_every_row_builds_and_its_names_exist(name: str) -> None:
    preset = choose(name)
    assert preset.order in ORDERS
    assert preset.placement in PLACEMENTS
    assert preset.preemption in PREEMPTIONS
    assert preset.victim in VICTIMS
    assert preset.residency in RESIDENCIES
    assert resolve(preset.batcher, preset.params) == preset.params
    assert not set(preset.params) & set(preset.ordering)  # both may be overridden by name
    assert SchedulerState(preset).next_deadline() == float("inf")


def test_the_rows_there_are() -> None:
    assert list(presets()) == [
        "fcfs",
        "conservative",
        "past-future",
        "alise",
        "alise-recompute",
        "alise-defer",
        "alise-oracle",
    ]


def test_alise_and_its_rivals_differ_in_one_choice() -> None:
    rows = {name: choose(name) for name in presets() if name.startswith("alise")}
    assert {name: row.residency for name, row in rows.items()} == {
        "alise": "swap",
        "alise-recompute": "recompute",
        "alise-defer": "defer",
        "alise-oracle": "swap",
    }
    assert {name for name, row in rows.items() if row.predictor != "retrieval"} == {"alise-oracle"}
    assert all(row.ordering == ALISE for row in rows.values())


def test_choices_and_numbers_are_overridden_by_name() -> None:
    preset = choose("alise", {"ageing_s": "3", "watermark": "0.9", "residency": "cost"})
    assert preset.ordering == ALISE | {"ageing_s": 3.0}
    assert preset.params == {"watermark": 0.9}
    assert preset.residency == "cost"
    assert choose("fcfs", {"residency": "swap"}).keeps_kv


def test_numbers_go_with_the_order_and_preemption_that_take_them() -> None:
    assert choose("alise", {"order": "arrival"}).ordering == {"hysteresis": 0.25}
    assert choose("alise", {"preemption": "never"}).ordering == {
        key: ALISE[key] for key in ("levels", "base_s", "ageing_s")
    }
    made = choose("fcfs", {"order": "alise", "preemption": "priority", "base_s": 2})
    assert made.ordering == ALISE | {"base_s": 2.0}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"order": "alice"}, "unknown preset.order 'alice', did you mean alise?"),
        ({"preemption": "always"}, "unknown preset.preemption 'always'; known: never, priority"),
        ({"residency": "swop"}, "unknown preset.residency 'swop', did you mean swap?"),
        ({"agein_s": 1}, "unknown preset key 'agein_s', did you mean ageing_s?"),
        ({"ageing_s": 0}, r"preset.ordering.ageing_s must lie in \[0.001, 1e\+06\], got 0"),
        ({"hysteresis": "nan"}, r"preset.ordering.hysteresis must lie in \[0, 100\], got nan"),
        ({"levels": 0.5}, r"preset.ordering.levels must lie in \[1, 32\], got 0.5"),
        ({"base_s": "soon"}, "preset.base_s takes a float, got 'soon'"),
        ({"order": "arrival", "levels": 3}, "unknown preset key 'levels'"),
        ({"slice_tokens": -1}, "preset.slice_tokens must not be negative, got -1"),
    ],
)
def test_mistakes_are_said(overrides: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        choose("alise", overrides)


def test_a_row_with_a_number_that_nothing_takes_is_refused() -> None:
    row = ("x", "max", "aggressive", "arrival", "least_load", "never", "newest", "recompute", 0)
    with pytest.raises(ValueError, match=r"preset.ordering has no parameter 'levels'; known: none"):
        Preset(*row, ordering={"levels": 8})


def test_workers_know_every_residency_that_a_preset_may_name():
    """The two services don't import each other, and a plan names it."""
    assert set(RESIDENCIES) == set(WORKER_RESIDENCIES)
