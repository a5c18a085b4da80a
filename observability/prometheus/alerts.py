"""What somebody is called for, each with what to do.

An alert's parts are joined by `and`; each is a value beside the limit it is held against, so that
what is compared can be looked at while it does not fire.
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
    """A value, how it is compared, and with what."""

    value: str
    is_: str
    limit: float

    def __str__(self) -> str:
        return f"{self.value} {self.is_} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Alert:
    """Fires when all parts have held for so long. `runbook` says what to look at, in order."""

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
        f"Over {burn.short} and {burn.long} its error budget goes {{{{ $value | humanize }}}} "
        f"times as fast as 30 days allow. At {burn.times:g} times, {burn.spent} of it are gone "
        f"after {burn.long}.",
        _SLA_RUNBOOK,
    )


_SLA_RUNBOOK = """\
1. Dashboard SLA, misses by cause. It says which stage broke the agreement.
2. rejected, queued: more is asked for than is served. Dashboard Scheduling: queue, refusals, \
workers attached. Add workers, or let fewer clients ask at once.
3. prefill: prompts are long, or prefills wait on one another. Dashboard Workers: batch tokens, \
step time. Lower worker.max_batch_tokens where decodes suffer, raise it where prefills do.
4. preempted, swap-in: too much was placed. See ForetokenKvEvicting and ForetokenKvSwapping.
5. decode: steps are too slow for the class's TPOT. Dashboard Workers: step time against batch. \
Fewer at once (worker.max_running), or a class with a wider budget.
6. One request: `foretoken why ID` tells its story.
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
    "A worker is gone",
    "{{ $value }} fewer workers are attached than within the last 15 minutes. What they had is "
    "resubmitted elsewhere from where it was; capacity is less.",
    """\
1. Was it meant (scaled down, deployed)? Then this ends by itself after 15 minutes.
2. The worker's log and exit status: out of memory, a lost GPU, a failed step say so there.
3. It runs, but is not attached: the scheduler's address, and the network between them.
4. Until it is back: dashboard Scheduling, queue and refusals; dashboard Workers, who is left.
""",
)
NO_WORKER = Alert(
    "ForetokenNoWorker",
    (Part(RULES.gauge(scheduler.WORKERS), "==", 0),),
    "1m",
    PAGE,
    "No worker is attached: nothing is served",
    "The scheduler has had no worker for a minute; every request waits or is refused. Without a "
    "scheduler it is ForetokenServingDown that fires.",
    """\
1. Are worker processes running? Their logs say what they wait for; loading a large model takes \
minutes.
2. Do they reach the scheduler (worker.scheduler_address)? They try again every few seconds.
3. All lost at once: the host, the driver, or a request that breaks the step of whoever takes it. \
The log names the requests of a step that failed.
""",
)
NEEDED_DOWN = Alert(
    "ForetokenServingDown",
    (Part(UP_NEEDED, "==", 0),),
    "1m",
    PAGE,
    "{{ $labels.job }} does not answer, without which nothing is served",
    "For a minute its metrics could not be read, or it is not looked for at all. Without a gateway "
    "nobody is answered there; without the scheduler nothing new is placed, and what runs goes on.",
    """\
1. Is the process up? Its health: `python -m services.runtime.healthcheck HOST:PORT`. Its log says \
why it ended.
2. It is, and serves: metrics_port and metrics_host of its section, and the target in \
prometheus.yml.
3. The scheduler of `foretoken serve` is told of by the gateway's /metrics: is \
foretoken_metrics_peers_missing above 0?
4. Start it again. Gateways and workers find a new scheduler by themselves and tell it what runs.
""",
)
PROCESS_DOWN = Alert(
    "ForetokenProcessDown",
    (Part(UP_BESIDE, "==", 0),),
    "2m",
    TICKET,
    "{{ $labels.job }} at {{ $labels.instance }} does not answer",
    "Its metrics could not be read for 2 minutes. What a worker had goes on elsewhere; predictor, "
    "batcher and estimator are stood in for, at some cost in foresight.",
    """\
1. Is the process up? Its health: `python -m services.runtime.healthcheck HOST:PORT`.
2. It is, and serves: metrics_port and metrics_host of its section, and the target in \
prometheus.yml.
3. It was removed on purpose: take it out of prometheus.yml.
""",
)
QUEUE_SATURATED = Alert(
    "ForetokenQueueSaturated",
    (Part(REFUSED.name, ">", limits.REFUSED_SHARE),),
    "5m",
    PAGE,
    "{{ $value | humanizePercentage }} of requests are turned away: too much waits",
    "Gateways and scheduler refuse because queues are full or would not be served in time. What "
    "is taken in is served as before; the rest is told when to retry.",
    """\
1. Dashboard Scheduling, refusals by what stood in the way: which bound is it?
2. Is it more than usual that comes, or less than usual that is served (workers attached, step \
time, evictions)?
3. More comes: add workers. One tenant alone: scheduler.tenant_weights.
4. Clients should heed Retry-After; the retries of those who don't are refused at no cost.
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
    "Forecasts have come to be wrong in another way than before",
    "Where the last 250 lengths lay in their forecasts differs by {{ $value | humanize }} "
    "(Kolmogorov-Smirnov) from where those before lay: the traffic or the model has changed.",
    """\
1. Dashboard Forecasts: coverage, tau and error by source. Has coverage fallen with it?
2. Was a model, a system prompt or a client changed? Then the next fits learn it: see fits and \
model age.
3. Fits are refused or don't come (fits by result, the log's state): mend that first.
4. Where the model does worse than history, history is served by itself (set aside): nothing \
breaks, order and placing are less well informed.
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
    "Forecasts promise more than they hold",
    "Only {{ $value | humanizePercentage }} of lengths lie within the interval that should have "
    "90 % of them: memory is planned too tightly, and requests get evicted.",
    """\
1. Dashboard Memory: predicted peak against actual, evictions. Is it felt yet?
2. Dashboard Forecasts: which source is off (error by source)? Fallbacks: is the predictor asked \
at all?
3. As for ForetokenForecastDrift: what changed, and do fits come?
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
    "Steps of worker {{ $labels.worker }} take other times than its cost model says",
    "Half of the steps differ by more than {{ $value | humanizePercentage }} from what was told "
    "of them before. TTFTs are foreseen wrongly, and slices and admission with them.",
    """\
1. Dashboard Workers: has step time changed without the batch? A throttled or shared device, \
another process on its cores.
2. Dashboard Forecasts, cost model: do timings come and are they used? Is it fitted anew?
3. Models are a worker's own. One worker alone: look at its device. All at once: at what changed \
everywhere, the model served or its settings.
""",
)
KV_EVICTING = Alert(
    "ForetokenKvEvicting",
    (Part(EVICTED.name, ">", limits.EVICTIONS_PER_ADMISSION),),
    "5m",
    TICKET,
    "Worker {{ $labels.worker }} evicts what was placed on it",
    "{{ $value | humanize }} requests are stopped for want of memory for each that is admitted: "
    "memory was planned too tightly, and work is done twice.",
    """\
1. Dashboard Memory: predicted peak against actual. The actual is above: forecasts are too low \
(see ForetokenForecastCoverage).
2. It is not: does another preset plan for mean lengths alone? Dashboard Scheduling, preset.
3. Host memory full (KV let go)? Raise worker.host_gib, so that work is moved and not lost.
4. More KV: worker.kv_dtype=int8, worker.gpu_memory_utilization, or another worker.
""",
)
KV_SWAPPING = Alert(
    "ForetokenKvSwapping",
    (Part(SWAPPING.name, ">", limits.SWAPPING_SHARE),),
    "5m",
    TICKET,
    "Worker {{ $labels.worker }} spends its time moving KV",
    "{{ $value | humanize }} seconds of each second go into copying KV between device and host.",
    """\
1. Dashboard Scheduling, preemptions: paused by a plan, or evicted by the worker? Evicted: see \
ForetokenKvEvicting.
2. Paused: the order changes its mind too often. Longer slices, or an order by fewer levels \
(`--set preset.slice=…`).
3. Dashboard Memory: seconds a token against what the cost model says. Slower than it says: is \
host memory pinned, is the bus shared?
4. Computing again may be cheaper than moving: `--set preset.residency=…`.
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
