"""`python -m observability.prometheus.build` writes rules.yml and alerts.yml beside this file."""

from pathlib import Path
from typing import Any

import yaml

from observability.prometheus.alerts import ALERTS, Alert
from observability.prometheus.records import GROUPS

FOLDER = Path(__file__).parent
MADE = "# Made by `make dashboards` from observability/prometheus: change it there.\n"
AIMED = (
    "# The first rule is the objective, the share of requests that should keep their SLA; all\n"
    "# burn rates follow it. Beneath 0.94 the fastest alert can't fire (limits.py).\n"
)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line texts as blocks, so that a runbook is readable."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def rules() -> dict[str, Any]:
    """Recording rules, as Prometheus reads them."""
    return {
        "groups": [
            {"name": name, "rules": [{"record": r.name, "expr": r.expr} for r in records]}
            for name, records in GROUPS.items()
        ]
    }


def alerts() -> dict[str, Any]:
    """Alerting rules, as Prometheus reads them."""
    return {"groups": [{"name": "foretoken-alerts", "rules": [_alert(each) for each in ALERTS]}]}


def _alert(alert: Alert) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.hold,
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook": alert.runbook,
        },
    }


def files() -> dict[str, str]:
    """The content of each file by name."""
    return {
        "rules.yml": MADE + AIMED + _dump(rules()),
        "alerts.yml": MADE + _dump(alerts()),
    }


def _dump(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
