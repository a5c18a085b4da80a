"""Alerts with runbooks.

An alert fires if all its conditions are true. Each condition separates value and limit, so that
the value can be queried while the alert does not fire.
"""

from dataclasses import dataclass

from observability.metrics import estimator, gateway, predictor, scheduler
from observability.prometheus import limits
from observability.prometheus.limits import BURNS, Burn
from observability.prometheus.records import (
    BURN_RATES,
    ENDED,
    EVICTED,
    REFUSED,
    RULES,
    SWAPPING,
)

PAGE, TICKET = "page", "ticket"
# `up` is a metric of Prometheus: 1 while a target answers scrapes.
#
# A target is required for serving if its job has the usual name, or, because operators choose job
# names, if it exposed metrics of a gateway or a scheduler within the last hour.
REQUIRED_JOBS = "foretoken-(gateway|scheduler)"
GATEWAY, SCHEDULER = gateway.RUNNING.family, scheduler.WORKERS.family
SEEN = f"(last_over_time({GATEWAY}[1h]) or last_over_time({SCHEDULER}[1h]))"
UP_SERVING = f'(up{{job=~"{REQUIRED_JOBS}"}} or (up and on (job, instance) {SEEN}))'
UP_OPTIONAL = f'(up{{job=~"foretoken.*", job!~"{REQUIRED_JOBS}"}} unless on (job, instance) {SEEN})'


def _missing(component: str, present: str, family: str) -> str:
    """0 with a job label if the component has no target. A target that is down counts as present,
    because its `up` is 0."""
    down = f"(up == 0 and on (job, instance) last_over_time({family}[1h]))"
    found = f"{present} or {down}"
    return f'label_replace(0 * absent({found}), "job", "foretoken-{component}", "", "")'


# The scheduler may have no separate target: `foretoken serve` exposes its metrics at the gateway.
NO_GATEWAY = _missing("gateway", f'up{{job="foretoken-gateway"}} or {GATEWAY}', GATEWAY)
NO_SCHEDULER = _missing("scheduler", SCHEDULER, SCHEDULER)
UP_REQUIRED = f"({UP_SERVING} or on (job) {NO_GATEWAY} or on (job) {NO_SCHEDULER})"


@dataclass(frozen=True, slots=True)
class Condition:
    """A query and its limit."""

    value: str
    operator: str
    limit: float

    def __str__(self) -> str:
        return f"{self.value} {self.operator} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when all conditions have been true for `hold`. `runbook`: numbered steps."""

    name: str
    conditions: tuple[Condition, ...]
    hold: str
    severity: str
    summary: str
    description: str
    runbook: str

    @property
    def expr(self) -> str:
        return " and ".join(map(str, self.conditions))


def _burn(burn: Burn) -> Alert:
    return Alert(
        burn.name,
        (
            Condition(BURN_RATES[burn.short].name, ">", burn.times),
            Condition(BURN_RATES[burn.long].name, ">", burn.times),
            Condition(ENDED[burn.long].name, ">=", limits.REQUESTS_MIN),
        ),
        "0m" if burn.severity == PAGE else "15m",
        burn.severity,
        "SLA class {{ $labels.class }} of {{ $labels.model_name }} misses its objective",
        f"Over {burn.short} and {burn.long}, misses consume the 30-day error budget "
        f"{{{{ $value | humanize }}}} times too fast. At {burn.times:g} times, {burn.spent} of the "
        f"budget are consumed after {burn.long}.",
        _SLA_RUNBOOK,
    )


_SLA_RUNBOOK = """\
1. Check which stage causes the misses: dashboard SLA, misses by cause.
2. rejected, queued: demand exceeds capacity. Check queue, refusals and workers on dashboard \
Scheduling. Add workers or limit the clients' concurrency.
3. prefill: prompts are long, or prefills wait for each other. Check tokens per step and step time \
on dashboard Workers. Lower worker.max_batch_tokens if decodes are slow, raise it if prefills are.
4. preempted, swap-in: workers are overcommitted. See ForetokenKvEvicting and ForetokenKvSwapping.
5. decode: steps are too slow for the TPOT of the class. Check step time and tokens per step on \
dashboard Workers. Lower worker.max_running, or use a class with a larger budget.
6. For a single request, `foretoken why ID` shows its history.
"""

CHECK_PROCESS = """\
1. Check the process with `python -m services.runtime.healthcheck HOST:PORT`, and its log.
2. If it is serving, check metrics_port and metrics_host of its section, and the target in \
prometheus.yml.
"""

WORKER_LOST = Alert(
    "ForetokenWorkerLost",
    (
        Condition(
            f"max_over_time({RULES.gauge(scheduler.WORKERS)}[15m:5s]) "
            f"- {RULES.gauge(scheduler.WORKERS)}",
            ">",
            0,
        ),
    ),
    "1m",
    TICKET,
    "A worker is lost",
    "{{ $value }} fewer workers are attached than within the last 15 minutes. Their requests "
    "continue on other workers; capacity is reduced.",
    """\
1. If the worker was removed intentionally (scale-down, deployment), do nothing: the alert ends \
after 15 minutes.
2. Check the worker's log and exit status for lack of memory, a lost GPU or a failed step.
3. If the worker runs but is not attached, check worker.scheduler_address and the network.
4. Meanwhile, watch queue and refusals on dashboard Scheduling, and the remaining workers on \
dashboard Workers.
""",
)
NO_WORKER = Alert(
    "ForetokenNoWorker",
    (Condition(RULES.gauge(scheduler.WORKERS), "==", 0),),
    "1m",
    PAGE,
    "No worker is attached; no request is served",
    "The scheduler has had no worker for a minute; every request waits or is refused. Without a "
    "scheduler, ForetokenServingDown fires instead.",
    """\
1. Check that worker processes run. Their logs show the stage of the start; loading a large model \
takes minutes.
2. Check that they reach the scheduler (worker.scheduler_address). They retry every few seconds.
3. If all workers were lost at once, check the host, the driver, and the logs for a request that \
fails the step of every worker. The log names the requests of a failed step.
""",
)
SERVING_DOWN = Alert(
    "ForetokenServingDown",
    (Condition(UP_REQUIRED, "==", 0),),
    "1m",
    PAGE,
    "{{ $labels.job }}, which is required for serving, is down",
    "Its metrics could not be scraped for a minute, or it has no scrape target. Without a gateway, "
    "its clients get no response. Without a scheduler, running requests continue, and no new "
    "request is placed.",
    CHECK_PROCESS
    + """\
3. With `foretoken serve`, the gateway's /metrics includes the scheduler's: check that \
foretoken_metrics_peers_missing is 0.
4. Restart the process. Gateways and workers reconnect to a new scheduler and announce running \
requests.
""",
)
PROCESS_DOWN = Alert(
    "ForetokenProcessDown",
    (Condition(UP_OPTIONAL, "==", 0),),
    "2m",
    TICKET,
    "{{ $labels.job }} at {{ $labels.instance }} is down",
    "Its metrics could not be scraped for 2 minutes. The requests of a lost worker continue on "
    "other workers. Without predictor, batcher or estimator, the scheduler uses fallbacks.",
    CHECK_PROCESS
    + """\
3. If it was removed intentionally, remove it from prometheus.yml.
""",
)
QUEUE_SATURATED = Alert(
    "ForetokenQueueSaturated",
    (Condition(REFUSED.name, ">", limits.REFUSED_SHARE),),
    "5m",
    PAGE,
    "{{ $value | humanizePercentage }} of requests are refused: queues are full",
    "Gateways and scheduler refuse requests that exceed a queue or would miss their deadline. "
    "Accepted requests are served as before. Refusals carry a Retry-After header.",
    """\
1. Check which limit is reached: dashboard Scheduling, refusals.
2. Check whether demand is higher than usual, or capacity lower (workers, step time, evictions).
3. If demand is higher, add workers. If one tenant causes it, set scheduler.tenant_weights.
4. Check that clients honour Retry-After. Early retries are refused without parsing.
""",
)
LIMITS_NOT_SHARED = Alert(
    "ForetokenKeyLimitsNotShared",
    (Condition(RULES.gauge(gateway.LIMITS_SHARED, agg="min"), "==", 0),),
    "5m",
    TICKET,
    "A gateway does not share the limits of API keys",
    "It has not reached Redis for 5 minutes. It keeps to its part of each limit, by the number of "
    "gateways that it knew last: a key with requests at few gateways has less than its limit.",
    """\
1. Check the gateway's log: a warning names the address and the cause.
2. Check that Redis runs and answers PING, and that the gateway reaches it (gateway.limits_url, \
NetworkPolicies). Its user needs the commands that gateway/admission/shared_limits.py lists.
3. If Redis runs but is slow, or the event loops of gateways are busy, raise gateway.limits_wait_s.
4. Do not restart the gateways: they share the limits again once Redis is back. A gateway that \
starts without Redis knows only the gateways of its own server, and divides the limits by those.
""",
)
FORECAST_DRIFT = Alert(
    "ForetokenForecastDrift",
    (
        Condition(RULES.gauge(predictor.DRIFT, agg="max"), ">", limits.FORECAST_DRIFT),
        Condition(RULES.gauge(predictor.SCORED, agg="max"), ">=", limits.SCORED_MIN),
    ),
    "15m",
    TICKET,
    "Forecast errors have changed",
    "The Kolmogorov-Smirnov distance between the quantile levels of the last 250 lengths in their "
    "forecasts and those before is {{ $value | humanize }}: the traffic or the model has changed.",
    """\
1. Check coverage, tau and error by source on dashboard Forecasts.
2. Check whether a model, a system prompt or a client has changed. The next fits learn the change: \
check fits by result and the age of the model.
3. If fits fail or are missing, check the predictor's log and the state of the outcome log first.
4. While the model is less accurate than history, history's forecasts are used (prompt model set \
aside): serving continues with less accurate order and placement.
""",
)
FORECAST_COVERAGE = Alert(
    "ForetokenForecastCoverage",
    (
        Condition(
            RULES.gauge(predictor.COVERAGE, agg="min", where={"interval": "90"}),
            "<",
            limits.COVERAGE_90,
        ),
        Condition(RULES.gauge(predictor.SCORED, agg="max"), ">=", limits.SCORED_MIN),
    ),
    "15m",
    TICKET,
    "Forecast intervals are too narrow",
    "Only {{ $value | humanizePercentage }} of lengths are within the 90 % interval. Plans reserve "
    "too little memory, and requests may be evicted.",
    """\
1. Check the effect: forecast peak, held tokens and evictions on dashboard Memory.
2. Check which source is wrong, and whether the predictor is used: error by source and fallbacks \
on dashboard Forecasts.
3. Continue with steps 2 to 4 of ForetokenForecastDrift.
""",
)
COST_MODEL_DRIFT = Alert(
    "ForetokenCostModelDrift",
    (
        Condition(
            RULES.gauge(estimator.ERROR, "worker", agg="max", where={"quantile": "0.5"}),
            ">",
            limits.COST_ERROR,
        ),
        Condition(RULES.gauge(estimator.ERROR_STEPS, "worker", agg="max"), ">", 0),
    ),
    "15m",
    TICKET,
    "Steps of worker {{ $labels.worker }} deviate from its cost model",
    "Half of the steps differ by more than {{ $value | humanizePercentage }} from their estimated "
    "times. Expected TTFTs, slices and admission are inaccurate.",
    """\
1. Check on dashboard Workers whether step time has changed while tokens per step have not: the \
device may be throttled or shared, or another process may use its cores.
2. Check timings and fits on dashboard Forecasts, cost model: timings must arrive and be used.
3. If one worker is affected, check its device. If all are, check common changes, such as the \
model or its settings.
""",
)
KV_EVICTING = Alert(
    "ForetokenKvEvicting",
    (Condition(EVICTED.name, ">", limits.EVICTIONS_PER_ADMISSION),),
    "5m",
    TICKET,
    "Worker {{ $labels.worker }} evicts requests",
    "{{ $value | humanize }} requests are evicted per admission: memory is short, and work is "
    "repeated.",
    """\
1. Check on dashboard Memory whether held tokens exceed the forecast peak. If they do, forecasts \
are too low: see ForetokenForecastCoverage.
2. Otherwise check on dashboard Scheduling whether the preset plans with mean lengths only.
3. If KV is dropped because host memory is full, raise worker.host_gib, so that KV is offloaded.
4. Increase the memory for KV: worker.kv_dtype=int8, worker.gpu_memory_utilization, or another \
worker.
""",
)
KV_SWAPPING = Alert(
    "ForetokenKvSwapping",
    (Condition(SWAPPING.name, ">", limits.SWAPPING_SHARE),),
    "5m",
    TICKET,
    "Worker {{ $labels.worker }} spends most of its time copying KV",
    "It copies KV between device and host for {{ $value | humanizePercentage }} of the time.",
    """\
1. Check preemptions by cause on dashboard Scheduling. Evicted: see ForetokenKvEvicting.
2. Paused: the order changes too often. Use longer slices, or an order with fewer levels \
(`--set preset.slice=…`).
3. Check the copy time per token on dashboard Memory. If it is above the estimate, check that host \
memory is pinned and the bus is not shared.
4. Recomputing may be cheaper than copying: `--set preset.residency=…`.
""",
)

ALERTS = (
    *(_burn(burn) for burn in BURNS),
    WORKER_LOST,
    NO_WORKER,
    SERVING_DOWN,
    PROCESS_DOWN,
    QUEUE_SATURATED,
    LIMITS_NOT_SHARED,
    FORECAST_DRIFT,
    FORECAST_COVERAGE,
    COST_MODEL_DRIFT,
    KV_EVICTING,
    KV_SWAPPING,
)
