"""A dashboard: rows of panels below its variables."""

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from observability.grafana.parts import SOURCE, Panel, Q
from observability.metrics import gateway, worker

TAG = "foretoken"
ALL = VariableOption(selected=True, text=["All"], value=["$__all"])
# The variables: name in queries, label, and the query for the values.
CHOICES = (
    ("model", "Model", Q.values_of(gateway.RUNNING, "model_name")),
    ("class", "SLA class", Q.values_of(gateway.SLA, "class")),
    ("worker", "Worker", Q.values_of(worker.RUNNING, "worker")),
)


@dataclass(frozen=True, slots=True)
class Section:
    """A row's title, and its panels from left to right."""

    title: str
    panels: Sequence[Panel]


def board(name: str, description: str, *sections: Section) -> model.Dashboard:
    """The dashboard `foretoken-NAME`."""
    made = (
        Dashboard(f"foretoken: {name}")
        .uid(f"foretoken-{name.lower()}")
        .description(description)
        .tags([TAG])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .link(_dashboard_links())
        .with_variable(DatasourceVariable("source").label("Data source").type("prometheus"))
    )
    for choice, label, query in CHOICES:
        made.with_variable(_choice(choice, label, query))
    number = 0
    for section in sections:
        number += 1
        made.with_row(Row(section.title).id(number))
        for panel in section.panels:
            number += 1
            panel.id(number)
            made.with_panel(panel)
    return _plain(made.build())


def _plain(board: model.Dashboard) -> model.Dashboard:
    """Removes what Grafana's schema only knows for interval variables."""
    for variable in board.templating.list_val or ():
        variable.auto = variable.auto_min = variable.auto_count = None
    return board


def _choice(name: str, label: str, query: str) -> QueryVariable:
    """All values by default. "All" matches any value, including a missing label."""
    return (
        QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(ALL)
    )


def _dashboard_links() -> DashboardLink:
    return (
        DashboardLink("foretoken")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .keep_time(True)
        .include_vars(True)
    )
