"""All reproductions by name."""

from simulator.papers.magnus.tables import MAGNUS
from simulator.papers.past_future.table1 import TABLE1
from simulator.papers.reproduction import Reproduction
from simulator.papers.scls.tables import SCLS

REPRODUCTIONS: dict[str, Reproduction] = {
    "past-future-table1": TABLE1,
    "scls": SCLS,
    "magnus": MAGNUS,
}
