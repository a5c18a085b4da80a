"""Recording rules: SLA misses and burn rates over the windows of alerts, and load.

Requests of disconnected clients (cause `client`) are not counted.
"""

from observability.metrics import gateway, scheduler, worker
from observability.prometheus.limits import BURNS, OBJECTIVE, WINDOWS
from observability.prometheus.promql import (
    NotEqual,
    OneOf,
    Queries,
    Record,
    Where,
    ratio,
    share,
    sum_of,
)

RULES = Queries("5m")
CLASS = ("model_name", "class")
CONNECTED: Where = {"cause": NotEqual("client")}
MISSED: Where = {"outcome": "missed", **CONNECTED}
# Reasons for refusals under load; the others are errors of the request.
OVERLOAD = OneOf(("queue_full", "too_late"))

OBJECTIVE_RATIO = Record("foretoken:sla_objective:ratio", (), f"vector({OBJECTIVE:g})")

MISSES = {
    window: Record(
        f"foretoken:sla_miss:ratio_rate{window}",
        CLASS,
        share(
            RULES.rate(gateway.SLA, *CLASS, where=MISSED, window=window),
            RULES.rate(gateway.SLA, *CLASS, where=CONNECTED, window=window),
        ),
    )
    for window in WINDOWS
}
BURN_RATES = {
    window: Record(
        f"foretoken:sla_burn:rate{window}",
        CLASS,
        f"{miss.name} / on() group_left() (1 - {OBJECTIVE_RATIO.name})",
    )
    for window, miss in MISSES.items()
}
ENDED = {
    burn.long: Record(
        f"foretoken:sla_requests:increase{burn.long}",
        CLASS,
        RULES.increase(gateway.SLA, *CLASS, where=CONNECTED, window=burn.long),
    )
    for burn in BURNS
}
GOODPUT = Record(
    "foretoken:goodput_tokens:rate5m",
    ("model_name",),
    RULES.rate(gateway.GOODPUT_TOKENS, "model_name"),
)
REFUSED = Record(
    "foretoken:refused:ratio_rate5m",
    (),
    share(
        sum_of(
            RULES.rate(gateway.REFUSALS),
            RULES.rate(scheduler.REFUSED, where={"reason": OVERLOAD}),
        ),
        sum_of(RULES.rate(gateway.REFUSALS), RULES.rate(gateway.SUCCESS)),
    ),
)
EVICTED = Record(
    "foretoken:kv_evictions:per_admission_rate5m",
    ("worker",),
    ratio(RULES.rate(worker.EVICTIONS, "worker"), RULES.rate(scheduler.ADMITTED, "worker")),
)
SWAPPING = Record(
    "foretoken:kv_swapping:ratio_rate5m", ("worker",), RULES.summed(worker.SWAP, "worker")
)

GROUPS = {
    "foretoken-sla": (
        OBJECTIVE_RATIO,
        *MISSES.values(),
        *BURN_RATES.values(),
        *ENDED.values(),
        GOODPUT,
    ),
    "foretoken-load": (REFUSED, EVICTED, SWAPPING),
}
