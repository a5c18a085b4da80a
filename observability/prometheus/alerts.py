"""Alerts, each with its runbook.

An alert's parts are joined by `and`. Each part is a value and its limit, so that the value can be
inspected while the alert does not fire.
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
# `up` is Prometheus' own metric: 1 while a target answers.
#
# A target serves requests if its job has the usual name, or if it exposed metrics of a gateway or a
# scheduler within the last hour: job names are the user's choice.
NEEDED = "foretoken-(gateway|scheduler)"
GATEWAY, SCHEDULER = gateway.RUNNING.family, scheduler.WORKERS.family
SEEN = f"(last_over_time({GATEWAY}[1h]) or last_over_time({SCHEDULER}[1h]))"
UP_SERVING = f'(up{{job=~"{NEEDED}"}} or (up and on (job, instance) {SEEN}))'
UP_BESIDE = f'(up{{job=~"foretoken.*", job!~"{NEEDED}"}} unless on (job, instance) {SEEN})'


def _missing(component: str, present: str, family: str) -> str:
    """0 with a job label if no target is the component's. A target that is down counts as present:
    it fires by its `up`."""
    down = f"(up == 0 and on (job, instance) last_over_time({family}[1h]))"
    found = f"{present} or {down}"
    return f'label_replace(0 * absent({found}), "job", "foretoken-{component}", "", "")'


# The scheduler may have no target of its own: `foretoken serve` exposes its metrics at the gateway.
NO_GATEWAY = _missing("gateway", f'up{{job="foretoken-gateway"}} or {GATEWAY}', GATEWAY)
NO_SCHEDULER = _missing("scheduler", SCHEDULER, SCHEDULER)
UP_NEEDED = f"({UP_SERVING} or on (job) {NO_GATEWAY} or on (job) {NO_SCHEDULER})"


@dataclass(frozen=True, slots=True)
class Part:
    """A value, a comparison operator, and the limit."""

    value: str
    is_: str
    limit: float

    def __str__(self) -> str:
        return f"{self.value} {self.is_} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when all parts have been true for `hold`. `runbook` lists what to check, in order."""

    name: str
    parts: tuple[Part, ...]
    hold: str
    severity: str
    summary: str
    description: str
    runbook: str

    @property
    def expr(self) -> str:
        return " and ".join(str(part) for part in self.parts)


def _burn(burn: Burn) -> Alert:
    return Alert(
        burn.name,
        (
            Part(BURN_RATES[burn.short].name, ">", burn.times),
            Part(BURN_RATES[burn.long].name, ">", burn.times),
            Part(ENDED[burn.long].name, ">=", limits.REQUESTS_MIN),
        ),
        "0m" if burn.severity == PAGE else "15m",
        burn.severity,
        "SLA class {{ $labels.class }} of {{ $labels.model_name }} misses its objective",
        f"Over {burn.short} and {burn.long} its error budget burns {{{{ $value | humanize }}}} "
        f"times as fast as 30 days allow. At {burn.times:g} times, {burn.spent} of it are spent "
        f"after {burn.long}.",
        _SLA_RUNBOOK,
    )


_SLA_RUNBOOK = """\
1. Dashboard SLA, misses by cause: which stage causes the misses?
2. rejected, queued: demand exceeds capacity. Dashboard Scheduling: queue, refusals, workers \
attached. Add workers or limit the clients' concurrency.
3. prefill: prompts are long, or prefills wait for each other. Dashboard Workers: batch tokens, \
step time. Lower worker.max_batch_tokens if decodes are slow, raise it if prefills are.
4. preempted, swap-in: workers are overcommitted. See ForetokenKvEvicting and ForetokenKvSwapping.
5. decode: steps are too slow for the class's TPOT. Dashboard Workers: step time against batch. \
Lower worker.max_running, or use a class with a larger budget.
6. For a single request, `foretoken why ID` shows its history.
"""

WORKER_LOST = Alert(
    "ForetokenWorkerLost",
    (
        Part(
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
1. Was it intended (scale-down, deployment)? Then the alert ends after 15 minutes.
2. Check the worker's log and exit status for lack of memory, a lost GPU or a failed step.
3. It runs but is not attached: check the scheduler's address and the network.
4. Until it is back: dashboard Scheduling, queue and refusals; dashboard Workers, remaining workers.
""",
)
NO_WORKER = Alert(
    "ForetokenNoWorker",
    (Part(RULES.gauge(scheduler.WORKERS), "==", 0),),
    "1m",
    PAGE,
    "No worker is attached: nothing is served",
    "The scheduler has had no worker for a minute; every request waits or is refused. Without a "
    "scheduler, ForetokenServingDown fires instead.",
    """\
1. Are worker processes running? Their logs show the stage of the start; loading a large model \
takes minutes.
2. Do they reach the scheduler (worker.scheduler_address)? They retry every few seconds.
3. All lost at once: check the host, the driver, and the logs for a request that fails the step of \
every worker. The log names the requests of a failed step.
""",
)
NEEDED_DOWN = Alert(
    "ForetokenServingDown",
    (Part(UP_NEEDED, "==", 0),),
    "1m",
    PAGE,
    "{{ $labels.job }} is down; it is required for serving",
    "Its metrics could not be scraped for a minute, or it has no scrape target. Without a gateway, "
    "no client is answered there. Without the scheduler, running requests continue, and no new "
    "request is placed.",
    """\
1. Is the process running? Check `python -m services.runtime.healthcheck HOST:PORT` and its log.
2. It runs and serves: check metrics_port and metrics_host of its section, and the target in \
prometheus.yml.
3. The gateway's /metrics includes the scheduler of `foretoken serve`: is \
foretoken_metrics_peers_missing above 0?
4. Restart it. Gateways and workers reconnect to a new scheduler and announce running requests.
""",
)
PROCESS_DOWN = Alert(
    "ForetokenProcessDown",
    (Part(UP_BESIDE, "==", 0),),
    "2m",
    TICKET,
    "{{ $labels.job }} at {{ $labels.instance }} is down",
    "Its metrics could not be scraped for 2 minutes. A worker's requests continue elsewhere. "
    "Without predictor, batcher or estimator, the scheduler uses less accurate fallbacks.",
    """\
1. Is the process running? Check `python -m services.runtime.healthcheck HOST:PORT`.
2. It runs and serves: check metrics_port and metrics_host of its section, and the target in \
prometheus.yml.
3. It was removed intentionally: remove it from prometheus.yml.
""",
)
QUEUE_SATURATED = Alert(
    "ForetokenQueueSaturated",
    (Part(REFUSED.name, ">", limits.REFUSED_SHARE),),
    "5m",
    PAGE,
    "{{ $value | humanizePercentage }} of requests are refused: queues are full",
    "Gateways and scheduler refuse requests that exceed the queues or would miss their deadlines. "
    "Accepted requests are served as before; refused ones receive a Retry-After.",
    """\
1. Dashboard Scheduling, refusals by limit: which limit is reached?
2. Is the demand higher than usual, or the capacity lower (workers attached, step time, evictions)?
3. Higher demand: add workers. From a single tenant: set scheduler.tenant_weights.
4. Clients should honour Retry-After; early retries are refused at no cost.
""",
)
FORECAST_DRIFT = Alert(
    "ForetokenForecastDrift",
    (
        Part(RULES.gauge(predictor.DRIFT, how="max"), ">", limits.FORECAST_DRIFT),
        Part(RULES.gauge(predictor.SCORED, how="max"), ">=", limits.SCORED_MIN),
    ),
    "15m",
    TICKET,
    "Forecast errors have changed",
    "The forecast levels of the last 250 lengths differ by {{ $value | humanize }} "
    "(Kolmogorov-Smirnov) from those before: the traffic or the model has changed.",
    """\
1. Dashboard Forecasts: coverage, tau and error by source. Has coverage fallen, too?
2. Was a model, a system prompt or a client changed? The next fits learn it: check fits and model \
age.
3. Fits are rejected or missing (fits by result, state of the log): fix that first.
4. While the model is worse than history, history's forecasts are used (set aside): serving \
continues with a less informed order and placement.
""",
)
FORECAST_COVERAGE = Alert(
    "ForetokenForecastCoverage",
    (
        Part(
            RULES.gauge(predictor.COVERAGE, how="min", where={"interval": "90"}),
            "<",
            limits.COVERAGE_90,
        ),
        Part(RULES.gauge(predictor.SCORED, how="max"), ">=", limits.SCORED_MIN),
    ),
    "15m",
    TICKET,
    "Forecast intervals are too narrow",
    "Only {{ $value | humanizePercentage }} of lengths lie within the 90 % interval: memory is "
    "planned too tightly, and requests are evicted.",
    """\
1. Dashboard Memory: forecast peak against actual, evictions. Is there an effect yet?
2. Dashboard Forecasts: which source is wrong (error by source)? Is the predictor used (fallbacks)?
3. As for ForetokenForecastDrift: what changed, and are there fits?
""",
)
COST_MODEL_DRIFT = Alert(
    "ForetokenCostModelDrift",
    (
        Part(
            RULES.gauge(estimator.ERROR, "worker", how="max", where={"quantile": "0.5"}),
            ">",
            limits.COST_ERROR,
        ),
        Part(RULES.gauge(estimator.ERROR_STEPS, "worker", how="max"), ">", 0),
    ),
    "15m",
    TICKET,
    "Steps of worker {{ $labels.worker }} deviate from its cost model",
    "Half of the steps differ by more than {{ $value | humanizePercentage }} from their estimates. "
    "Expected TTFTs are wrong, and so are slices and admission.",
    """\
1. Dashboard Workers: has step time changed without the batch? A throttled or shared device, \
another process on its cores.
2. Dashboard Forecasts, cost model: do timings arrive, are they used, and are there new fits?
3. Each worker has its own cost model. One worker: check its device. All workers: check what \
changed everywhere, such as the model or its settings.
""",
)
KV_EVICTING = Alert(
    "ForetokenKvEvicting",
    (Part(EVICTED.name, ">", limits.EVICTIONS_PER_ADMISSION),),
    "5m",
    TICKET,
    "Worker {{ $labels.worker }} evicts requests",
    "{{ $value | humanize }} requests are evicted for each admission: memory is too tight, "
    "and work is repeated.",
    """\
1. Dashboard Memory: is the actual peak above the forecast? Then forecasts are too low (see \
ForetokenForecastCoverage).
2. Otherwise: does the preset plan for mean lengths only? Dashboard Scheduling, preset.
3. Is host memory full (KV dropped)? Raise worker.host_gib, so that KV is moved instead of dropped.
4. More KV: worker.kv_dtype=int8, worker.gpu_memory_utilization, or another worker.
""",
)
KV_SWAPPING = Alert(
    "ForetokenKvSwapping",
    (Part(SWAPPING.name, ">", limits.SWAPPING_SHARE),),
    "5m",
    TICKET,
    "Worker {{ $labels.worker }} spends most of its time moving KV",
    "It copies KV between device and host for {{ $value | humanize }} of each second.",
    """\
1. Dashboard Scheduling, preemptions: paused by plans, or evicted by the worker? Evicted: see \
ForetokenKvEvicting.
2. Paused: the order changes too often. Use longer slices, or an order with fewer levels \
(`--set preset.slice=…`).
3. Dashboard Memory: seconds per token. If slower than the cost model: is host memory pinned, is \
the bus shared?
4. Recomputing may be cheaper than moving: `--set preset.residency=…`.
""",
)

ALERTS = (
    *(_burn(burn) for burn in BURNS),
    WORKER_LOST,
    NO_WORKER,
    NEEDED_DOWN,
    PROCESS_DOWN,
    QUEUE_SATURATED,
    FORECAST_DRIFT,
    FORECAST_COVERAGE,
    COST_MODEL_DRIFT,
    KV_EVICTING,
    KV_SWAPPING,
)
