"""Recording rules and alerts: generated from code, valid for Prometheus, and tested."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from observability.prometheus import build
from observability.prometheus.alerts import ALERTS
from observability.prometheus.limits import BURNS, OBJECTIVE
from tests.observability.prometheus.queries import (
    NAMED,
    RECORDED,
    Query,
    alert_queries,
    panel_queries,
    record_queries,
    rules,
)

TESTS = build.FOLDER / "tests.yml"


def run(program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_committed_rules_are_current():
    for name, text in build.files().items():
        assert (build.FOLDER / name).read_text() == text, f"{name}: run `make dashboards`"


def test_rule_names_are_catalogued_or_recorded():
    for query in (*record_queries(), *alert_queries()):
        assert query.metrics() or "vector(" in query.expr or "up{" in query.expr, query.where
    for rule in rules("alerts.yml"):
        Query(rule["alert"], rule["expr"]).metrics()


def test_recorded_series_follow_their_inputs():
    seen: set[str] = set()
    for name, expr in RECORDED.items():
        assert {used for used in NAMED.findall(expr) if used in RECORDED} <= seen, name
        seen.add(name)


def test_every_alert_has_a_runbook():
    for rule in rules("alerts.yml"):
        message = rule["annotations"]
        assert message["summary"] and message["description"].endswith("."), rule["alert"]
        assert re.match(r"1\. .+\n2\. ", message["runbook"]), rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_burn_rate_descriptions_state_the_spent_budget():
    """times * long window / 30 days is the share of the budget in the description."""
    hours = {"1h": 1, "6h": 6, "1d": 24, "3d": 72}
    for burn in BURNS:
        assert f"{burn.times * hours[burn.long] / 720:.0%}" == burn.spent.replace(" ", "")
        assert burn.times * (1 - OBJECTIVE) < 1, "the alert cannot fire"


def test_promtool_accepts_rules_and_configuration(promtool_program: str, tmp_path: Path):
    for name in ("rules.yml", "alerts.yml"):
        done = run(promtool_program, "check", "rules", build.FOLDER / name)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run(promtool_program, "check", "config", build.FOLDER / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    broken = tmp_path / "rules.yml"
    broken.write_text((build.FOLDER / "rules.yml").read_text().replace("sum by", "sum bye"))
    assert run(promtool_program, "check", "rules", broken).returncode != 0


def test_promtool_parses_every_query(promtool_program: str, tmp_path: Path):
    queries = [*panel_queries(), *alert_queries()]
    made = [
        {"record": f"query:{number}", "expr": each.shown("1m", "1h")}
        for number, each in enumerate(queries)
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": made}]}))
    done = run(promtool_program, "check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries)} rules found" in done.stdout


@pytest.mark.slow
def test_promtool_unit_tests_pass(promtool_program: str):
    done = run(promtool_program, "test", "rules", TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


FIRING = re.compile(r'ALERTS\{alertname="(\w+)", ?alertstate="firing"\}')


def test_each_alert_has_a_firing_and_a_silent_case():
    fires: dict[str, set[bool]] = {alert.name: set() for alert in ALERTS}
    for case in yaml.safe_load(TESTS.read_text())["tests"]:
        for expected in case["promql_expr_test"]:
            name = FIRING.fullmatch(expected["expr"])
            assert name, expected["expr"]
            fires[name[1]].add(bool(expected.get("exp_samples")))
    assert all(seen == {True, False} for seen in fires.values()), fires


@pytest.mark.slow
def test_promtool_unit_tests_can_fail(promtool_program: str, tmp_path: Path):
    for name in ("rules.yml", "alerts.yml"):
        shutil.copy(build.FOLDER / name, tmp_path)
    broken = (tmp_path / "alerts.yml").read_text().replace("> 14.4", "> 1000")
    (tmp_path / "alerts.yml").write_text(broken)
    shutil.copy(TESTS, tmp_path)
    assert run(promtool_program, "test", "rules", tmp_path / "tests.yml").returncode != 0
