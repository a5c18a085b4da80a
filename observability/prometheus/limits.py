"""The thresholds of all alerts.

After a change: `make dashboards`. A running Prometheus takes another objective from the first rule
of rules.yml, on which all burn rates depend.
"""

from dataclasses import dataclass

# The share of requests that should meet their SLA over 30 days, per class.
OBJECTIVE = 0.99


@dataclass(frozen=True, slots=True)
class Burn:
    """Fires while misses consume the 30 days' budget `times` as fast as allowed, over a long window
    and, so that it ends with the misses, over a short one (The Site Reliability Workbook, chapter
    5)."""

    name: str
    short: str
    long: str
    times: float
    severity: str
    spent: str  # of 30 days' budget, by the end of the long window


BURNS = (
    Burn("ForetokenSlaBurnFast", "5m", "1h", 14.4, "page", "2 %"),
    Burn("ForetokenSlaBurnSlow", "30m", "6h", 6, "page", "5 %"),
    Burn("ForetokenSlaBurnDay", "2h", "1d", 3, "ticket", "10 %"),
    Burn("ForetokenSlaBurnLeak", "6h", "3d", 1, "ticket", "10 %"),
)
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
# Fewer requests than this in the long window are not significant: one miss of five is not 20 %.
REQUESTS_MIN = 20

REFUSED_SHARE = 0.05  # of requests, refused because queues are full
# for 250 against 250 outcomes; chance alone gives 0.17 once in a thousand checks
FORECAST_DRIFT = 0.2
COVERAGE_90 = 0.8  # of an expected 0.9; over 500 outcomes chance alone stays within 0.04
SCORED_MIN = 500  # outcomes behind either
COST_ERROR = 0.3  # median, of a step's time; rounds plan by it
EVICTIONS_PER_ADMISSION = 0.3  # for lack of memory: placed requests did not fit
SWAPPING_SHARE = 0.5  # of a worker's time

if OBJECTIVE + 1 / max(burn.times for burn in BURNS) <= 1:
    raise ValueError(
        f"with an objective of {OBJECTIVE:g} not even missing everything burns its budget "
        f"{max(burn.times for burn in BURNS):g} times too fast: choose smaller factors"
    )
