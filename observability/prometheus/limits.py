"""The thresholds of all alerts. `make dashboards` applies a change.

The objective can also be changed in a running Prometheus: it is the first rule of rules.yml, and
all burn rates are relative to it.
"""

from dataclasses import dataclass

# The share of requests that should meet their SLA over 30 days, per class.
OBJECTIVE = 0.99


@dataclass(frozen=True, slots=True)
class Burn:
    """An alert on the burn rate: the speed at which misses consume the error budget of 30 days,
    relative to the speed that consumes exactly all of it. Fires while the rate is above `times`
    over the long window and over the short one, which ends the alert soon after the misses (The
    Site Reliability Workbook, chapter 5, "Multiwindow, Multi-Burn-Rate Alerts")."""

    name: str
    short: str
    long: str
    times: float
    severity: str
    spent: str  # share of the budget that is consumed over the long window


BURNS = (
    Burn("ForetokenSlaBurnFast", "5m", "1h", 14.4, "page", "2 %"),
    Burn("ForetokenSlaBurnSlow", "30m", "6h", 6, "page", "5 %"),
    Burn("ForetokenSlaBurnDay", "2h", "1d", 3, "ticket", "10 %"),
    Burn("ForetokenSlaBurnLeak", "6h", "3d", 1, "ticket", "10 %"),
)
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
# With fewer requests in the long window, a share of misses is not significant.
REQUESTS_MIN = 20

REFUSED_SHARE = 0.05  # share of requests refused because queues are full
# Kolmogorov-Smirnov distance of 250 outcomes to 250 others; chance alone reaches 0.17 once in a
# thousand checks.
FORECAST_DRIFT = 0.2
COVERAGE_90 = 0.8  # expected: 0.9; chance alone deviates by at most 0.04 over 500 outcomes
SCORED_MIN = 500  # outcomes that drift and coverage must be computed from
COST_ERROR = 0.3  # median relative error of step times, which rounds plan with
EVICTIONS_PER_ADMISSION = 0.3  # evictions for lack of memory
SWAPPING_SHARE = 0.5  # share of a worker's time

FASTEST = max(burn.times for burn in BURNS)
if OBJECTIVE + 1 / FASTEST <= 1:
    raise ValueError(
        f"OBJECTIVE {OBJECTIVE:g} is too low: even if all requests miss, the burn rate stays below "
        f"{FASTEST:g}, the highest in BURNS; raise OBJECTIVE or lower Burn.times"
    )
