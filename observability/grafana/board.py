"""A dashboard as data, and its form in Grafana: rows of panels below its variables."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

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
# Variables by name in queries: the label, and the query for the values.
VARIABLES = (
    ("model", "Model", Q.values_of(gateway.RUNNING, "model_name")),
    ("class", "SLA class", Q.values_of(gateway.SLA, "class")),
    ("worker", "Worker", Q.values_of(worker.RUNNING, "worker")),
)


@dataclass(frozen=True, slots=True)
class Section:
    """A row's title, and its panels from left to right."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Board:
    """The dashboard `foretoken-NAME`."""

    name: str
    description: str
    sections: Sequence[Section]


def render(board: Board) -> model.Dashboard:
    """The dashboard as Grafana's model."""
    dashboard = (
        Dashboard(f"foretoken: {board.name}")
        .uid(f"foretoken-{board.name.lower()}")
        .description(board.description)
        .tags([TAG])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .link(
            DashboardLink("foretoken")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(DatasourceVariable("source").label("Data source").type("prometheus"))
    )
    for name, label, query in VARIABLES:
        dashboard.with_variable(_variable(name, label, query))
    ids = count(1)
    for section in board.sections:
        dashboard.with_row(Row(section.title).id(next(ids)))
        for panel in section.panels:
            panel.id(next(ids))
            dashboard.with_panel(panel)
    made = dashboard.build()
    for variable in made.templating.list_val or ():  # in the schema of interval variables only
        variable.auto = variable.auto_min = variable.auto_count = None
    return made


def _variable(name: str, label: str, query: str) -> QueryVariable:
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
