"""All reproductions by name."""

from simulator.papers.past_future.table1 import TABLE1
from simulator.papers.reproduction import Reproduction

REPRODUCTIONS: dict[str, Reproduction] = {
    "past-future-table1": TABLE1,
}
