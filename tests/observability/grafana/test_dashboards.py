"""The committed dashboards: generated from code, valid for Grafana, and complete."""

import json
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from observability.grafana import build
from observability.grafana.board import VARIABLES
from observability.metrics.catalogue import CATALOGUE
from observability.prometheus.promql import labels_of
from tests.observability.grafana.typed import type_errors
from tests.observability.prometheus.queries import VARIABLE, dashboards, panel_queries, panels

NAMES = [
    "forecasts.json",
    "memory.json",
    "picker.json",
    "scheduling.json",
    "sla.json",
    "workers.json",
]
GRAFANA_VARIABLES = {"$__rate_interval", "$__range"}

register_default_plugins()


def test_committed_dashboards_are_current():
    made = build.files()
    assert sorted(made) == NAMES == sorted(dashboards())
    for name, text in made.items():
        assert (build.FOLDER / name).read_text() == text, f"{name}: run `make dashboards`"


@pytest.fixture(params=NAMES)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dashboards()[request.param]


def round_trip(board: dict[str, Any]) -> Any:
    """The board, decoded into Grafana's models and encoded again."""
    return json.loads(JSONEncoder().encode(Dashboard.from_json(board)))


def is_contained(value: object, other: object) -> bool:
    """Whether `other` equals `value`, apart from additional keys."""
    if isinstance(value, dict) and isinstance(other, dict):
        return all(key in other and is_contained(part, other[key]) for key, part in value.items())
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_contained, value, other))
    return value == other


def test_dashboards_fit_grafana_s_models(board: dict[str, Any]):
    assert is_contained(board, round_trip(board))
    assert list(type_errors(Dashboard.from_json(board))) == []


def test_model_check_detects_a_mistake(board: dict[str, Any]):
    panel = panels(board)[0]
    panel["fieldConfig"]["defaults"]["thresholds"]["steps"][0]["value"] = "none"
    assert any("steps[0].value" in error for error in type_errors(Dashboard.from_json(board)))
    panel["fieldConfig"]["defaults"]["treshold"] = {}
    assert not is_contained(board, round_trip(board))


def test_every_panel_has_description_unit_and_thresholds(board: dict[str, Any]):
    for panel in panels(board):
        title, defaults = panel["title"], panel["fieldConfig"]["defaults"]
        assert panel["description"].endswith("."), title
        assert defaults["unit"], title
        first, *others = [step["value"] for step in defaults["thresholds"]["steps"]]
        assert first is None and others and others == sorted(set(others)), title
        assert panel["targets"], title
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs), title


def test_panels_are_unique_and_do_not_overlap(board: dict[str, Any]):
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_dashboards_have_the_four_variables(board: dict[str, Any]):
    chosen = board["templating"]["list"]
    assert [each["name"] for each in chosen] == ["source", *(name for name, _, _ in VARIABLES)]
    assert {panel["datasource"]["uid"] for panel in panels(board)} == {"${source}"}
    assert chosen[0]["query"] == "prometheus"


def test_queries_use_catalogued_names_and_known_variables():
    known = GRAFANA_VARIABLES | {f"${name}" for name, _, _ in VARIABLES}
    for query in panel_queries():
        assert query.metrics(), query.where  # KeyError for a metric that is not catalogued
        assert set(VARIABLE.findall(query.expr)) <= known, query.where


def test_queries_filter_by_variables():
    for query in panel_queries():
        for metric in query.metrics():
            if metric.family in query.expr and "class" in labels_of(metric):
                assert '$class"' in query.expr, query.where


def test_every_metric_has_a_panel():
    shown = {metric for query in panel_queries() for metric in query.metrics()}
    hidden = {m.name for metrics in CATALOGUE.values() for m in metrics} - {m.name for m in shown}
    assert hidden == set()
