"""presets.toml: every row is valid, and replaced choices are checked."""

from dataclasses import replace
from itertools import pairwise

import pytest

from services.policies.preset import CHOICES, RESIDENCIES, Preset, choose, presets
from services.scheduler.core.state import SchedulerState
from services.worker.kv.residency import RESIDENCIES as WORKER_RESIDENCIES

ALISE = {"levels": 8, "base_s": 0.02, "ageing_s": 10, "hysteresis": 0.25}
FILLING = {"watermark": 0.95, "slice_tokens": 32}


@pytest.mark.parametrize("name", presets())
def test_every_preset_builds(name: str) -> None:
    preset = choose(name)
    for stage, known in preset.stages().items():
        assert getattr(preset, stage) in known
    assert set(preset.params) == set(preset.known_params())
    assert SchedulerState(preset).next_deadline() == float("inf")


PROMISED = """
    fcfs orca conservative ccb sls ils so pm ab lb scls scls-cb vs vsq glp abp magnus past-future
    past-future-oracle alise alise-oracle alise-recompute alise-defer ltr ltr-classify ltr-oracle
    mlfq hrrn srtf gittins tail uniboost foretoken foretoken-recompute
"""


def test_preset_names() -> None:
    assert set(presets()) == set(PROMISED.split())


def test_alise_and_baselines_differ_in_one_choice() -> None:
    rows = {name: choose(name) for name in presets() if name.startswith("alise")}
    assert {name: row.residency for name, row in rows.items()} == {
        "alise": "swap_int8",
        "alise-recompute": "drop",
        "alise-defer": "defer",
        "alise-oracle": "swap_int8",
    }
    assert {name for name, row in rows.items() if row.predictor != "retrieval-plain"} == {
        "alise-oracle"
    }
    assert all(row.params == ALISE | FILLING for row in rows.values())


def differs(one: str, other: str) -> set[str]:
    """The choices and common numbers in which two rows differ."""
    a, b = choose(one), choose(other)
    numbers = {key for key in a.params.keys() & b.params if a.params[key] != b.params[key]}
    return {key for key in CHOICES if getattr(a, key) != getattr(b, key)} | numbers


def test_each_ablation_adds_one_feature() -> None:
    """SCLS (Cheng et al., 2024), §5.4, and Magnus (Cheng et al., ICWS 2024), §IV-C."""
    ladder = ["sls", "so", "pm", "ab", "lb", "scls"]
    assert [differs(*pair) for pair in pairwise(ladder)] == [
        # unfinished requests go behind later arrivals and prefill again
        {"slice", "order", "residency"},
        {"form", "interval"},
        {"batch_size"},
        {"place"},
        {"interval_share"},
    ]
    assert [differs(*pair) for pair in pairwise(["vsq", "vs", "glp", "abp", "magnus"])] == [
        {"batch_size"},
        {"predictor", "form"},
        {"batch_size"},
        {"order", "estimator"},
    ]
    for name in (*ladder, "vs", "vsq", "glp", "abp", "magnus"):
        assert choose(name).static and choose(name).about and choose(name).source
    assert (choose("vs").params["batch_size"], choose("vsq").params["batch_size"]) == (7, 10)


def test_arrangement_limits_placements() -> None:
    assert choose("vs", {"place": "max_min"}).place == "max_min"
    with pytest.raises(ValueError, match=r"unknown preset.place 'prefix_aware'"):
        choose("vs", {"place": "prefix_aware"})


def test_choices_and_params_are_overridden_by_name() -> None:
    preset = choose("alise", {"ageing_s": "3", "watermark": "0.9", "residency": "cost"})
    assert preset.params == ALISE | FILLING | {"ageing_s": 3.0, "watermark": 0.9}
    assert preset.residency == "cost"
    assert choose("fcfs", {"residency": "swap"}).keeps_kv
    assert choose("alise", {"hysteresis": "inf"}).params["hysteresis"] == float("inf")


def test_params_follow_their_stage() -> None:
    assert choose("alise", {"order": "arrival"}).params == FILLING
    assert choose("alise", {"slice": "whole"}).params == ALISE | {"watermark": 0.95}
    assert choose("alise", {"form": "conservative"}).params == ALISE | {
        "overcommit": 1.0,
        "slice_tokens": 32,
    }
    made = choose("fcfs", {"order": "alise", "slice": "tokens", "base_s": 2})
    assert made.params == ALISE | FILLING | {"base_s": 2.0}


def test_arrangement_limits_forms() -> None:
    assert choose("fcfs", {"arrangement": "batch", "form": "fixed"}).params == {"batch_size": 7}
    with pytest.raises(ValueError, match=r"unknown preset.form 'aggressive'.*; known: fixed"):
        choose("fcfs", {"arrangement": "batch"})
    with pytest.raises(ValueError, match=r"unknown preset.form 'dp'; known: aggressive, "):
        choose("fcfs", {"form": "dp"})


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"order": "alice"}, "unknown preset.order 'alice', did you mean alise?"),
        ({"place": "random"}, "unknown preset.place 'random'.*; known: least_load, round_robin"),
        ({"residency": "swop"}, "unknown preset.residency 'swop', did you mean swap?"),
        ({"arrangement": "bach"}, "unknown preset.arrangement 'bach', did you mean batch?"),
        ({"preemption": "never"}, "unknown preset key 'preemption'"),
        ({"agein_s": 1}, "unknown preset key 'agein_s', did you mean ageing_s?"),
        ({"ageing_s": 0}, r"preset.ageing_s must lie in \[0.001, 1e\+06\], got 0"),
        ({"hysteresis": "nan"}, r"preset.hysteresis must lie in \[0, inf\], got nan"),
        ({"levels": 0.5}, r"preset.levels must lie in \[1, 32\], got 0.5"),
        ({"base_s": "soon"}, "preset.base_s takes a number, got 'soon'"),
        ({"order": "arrival", "levels": 3}, "preset.levels is a number of preset.order=alise"),
        ({"slice_tokens": -1}, r"preset.slice_tokens must lie in \[1, 1.67772e\+07\], got -1"),
    ],
)
def test_invalid_preset_is_refused_with_reason(overrides: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        choose("alise", overrides)


def test_unused_param_is_refused() -> None:
    row = Preset(
        "x", "max", "linear", "continuous", "continuous", "arrival", "aggressive", "least_load",
        "whole", "events", "newest", "recompute",
    )  # fmt: skip
    assert row.params == {"watermark": 0.95}
    with pytest.raises(ValueError, match=r"preset has no parameter 'levels'; known: watermark"):
        replace(row, params={"levels": 8})


def test_workers_support_every_residency():
    """Scheduler and worker do not import each other, and plans name the residency."""
    assert set(RESIDENCIES) == set(WORKER_RESIDENCIES)
