"""All reproductions by name."""

from simulator.papers.alise.tables import TABLES as ALISE
from simulator.papers.ltr.tables import LTR
from simulator.papers.past_future.goodput import GOODPUT
from simulator.papers.past_future.table1 import TABLE1
from simulator.papers.reproduction import Reproduction

REPRODUCTIONS: dict[str, Reproduction] = {
    "alise": ALISE,
    "ltr": LTR,
    "past-future-goodput": GOODPUT,
    "past-future-table1": TABLE1,
}
