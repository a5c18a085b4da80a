"""What the scheduler counts: its queue, its rounds, and what it decided. Of workers it knows
reports alone: what they hold, they count themselves."""

from observability.metrics.metric import ROUND_S, SLACK_S, counter, gauge, histogram

WAITING = gauge("scheduler_requests_waiting", "Requests in the queue.")
RUNNING = gauge("scheduler_requests_running", "Requests admitted to a worker.")
WAITING_FOR = gauge(
    "scheduler_requests_waiting_for",
    "Requests in the queue that the last round looked at, by what they wait for.",
    "reason",
)  # fmt: skip
DECISIONS = counter(
    "scheduler_decisions", "Waiting requests that a round looked at, by what it said.", "reason"
)
ADMITTED = counter("scheduler_admissions", "Requests given a place, by worker.", "worker")
MOVES = counter(
    "scheduler_moves", "Requests whose KV rested at one worker and that were begun at another."
)
PREEMPTIONS = counter(
    "num_preemptions", "Requests that stopped before their end, by who stopped them: a plan "
    "(paused), their worker for want of memory (evicted), or its loss (lost).",
    "cause",
)  # fmt: skip
REFUSED = counter("scheduler_requests_refused", "Requests refused, by the reason.", "reason")
SLACK = histogram(
    "slack_at_admission_seconds",
    "What was left of a request's TTFT budget at its first place; below 0: it was over.",
    "class", buckets=SLACK_S,
)  # fmt: skip
INFEASIBLE = counter(
    "predicted_infeasible",
    "Requests whose TTFT budget was foreseen not to hold when a round first looked at them, for "
    "what stood before them in the queue and their own prefill.",
    "class",
)  # fmt: skip
PEAK = gauge(
    "predicted_peak_tokens",
    "Most KV tokens that a worker is foreseen to hold, by the last round that foresaw it.",
    "worker",
)  # fmt: skip
WORKERS = gauge("workers_attached", "Workers attached now.")
WORKERS_LOST = counter("workers_lost", "Times a worker's stream ended.")
PRESET = gauge("scheduler_preset", "1 for the preset that decides.", "preset")
ROUND = histogram("scheduler_round_seconds", "Time a round took in this process.", buckets=ROUND_S)
PLAN_AGE = histogram(
    "scheduler_plan_age_seconds", "From a plan's round until its worker said it was applied."
)
ARRANGED = counter(
    "scheduler_rounds_arranged",
    "Rounds by who arranged them: a batcher of its own, or this process because that was late or "
    "gone, or its answer wrong.",
    "by",
)  # fmt: skip
FALLBACKS = counter(
    "forecast_fallbacks",
    "Forecasts made from the scheduler's own history: the predictor's came late, its call failed, "
    "or it is not asked for a while (open).",
    "reason",
)  # fmt: skip
REPLACED = counter(
    "forecasts_replaced",
    "Forecasts replaced by better ones: a late answer, or one the predictor improved.",
    "by",
)  # fmt: skip
BREAKER = gauge(
    "forecast_breaker",
    "Whether the predictor is asked (closed), not asked (open), or tried (half_open).",
    "phase",
)  # fmt: skip
ADVICE_DROPPED = counter(
    "advice_dropped",
    "Outcomes and timings never told because too many waited for a service that is away.",
    "kind",
)  # fmt: skip

ALL = (
    WAITING, RUNNING, WAITING_FOR, DECISIONS, ADMITTED, MOVES, PREEMPTIONS, REFUSED, SLACK,
    INFEASIBLE, PEAK, WORKERS, WORKERS_LOST, PRESET, ROUND, PLAN_AGE, ARRANGED, FALLBACKS, REPLACED,
    BREAKER, ADVICE_DROPPED,
)  # fmt: skip
