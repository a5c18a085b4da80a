"""All reproductions by name."""

from simulator.papers.alise.tables import TABLES as ALISE
from simulator.papers.contest import ALL
from simulator.papers.ltr.tables import LTR
from simulator.papers.magnus.tables import MAGNUS
from simulator.papers.past_future.goodput import GOODPUT
from simulator.papers.past_future.table1 import TABLE1
from simulator.papers.reproduction import Reproduction
from simulator.papers.scls.tables import SCLS

REPRODUCTIONS: dict[str, Reproduction] = {
    "past-future-table1": TABLE1,
    "past-future-goodput": GOODPUT,
    "alise": ALISE,
    "ltr": LTR,
    "scls": SCLS,
    "magnus": MAGNUS,
    "all": ALL,
}
