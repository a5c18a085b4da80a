"""Metrics of the scheduler: its queue, rounds and decisions. Workers export their own memory."""

from observability.metrics.metric import ROUND_S, SLACK_S, counter, gauge, histogram

WAITING = gauge("scheduler_requests_waiting", "Requests in the queue.")
RUNNING = gauge("scheduler_requests_running", "Requests admitted to a worker.")
WAITING_FOR = gauge(
    "scheduler_requests_waiting_for",
    "Queued requests considered by the last round, by what they wait for.",
    "reason",
)  # fmt: skip
DECISIONS = counter(
    "scheduler_decisions", "Waiting requests considered by rounds, by decision.", "reason"
)
ADMITTED = counter("scheduler_admissions", "Admitted requests, by worker.", "worker")
MOVES = counter("scheduler_moves", "Requests with KV on one worker that were admitted at another.")
PREEMPTIONS = counter(
    "num_preemptions", "Preempted requests, by cause: a plan (paused), lack of memory at the "
    "worker (evicted), or its loss (lost).",
    "cause",
)  # fmt: skip
REFUSED = counter("scheduler_requests_refused", "Refused requests, by reason.", "reason")
SLACK = histogram(
    "slack_at_admission_seconds",
    "TTFT budget left at the first admission; negative if it was exceeded.",
    "class", buckets=SLACK_S,
)  # fmt: skip
INFEASIBLE = counter(
    "predicted_infeasible",
    "Requests expected to miss their TTFT budget when a round first considered them, by the queue "
    "ahead of them and their own prefill.",
    "class",
)  # fmt: skip
PEAK = gauge(
    "predicted_peak_tokens",
    "Forecast peak of a worker's KV tokens, by the last round that computed it.",
    "worker",
)  # fmt: skip
WORKERS = gauge("workers_attached", "Attached workers.")
WORKERS_LOST = counter("workers_lost", "Ended worker streams.")
PRESET = gauge("scheduler_preset", "1 for the active preset.", "preset")
ROUND = histogram("scheduler_round_seconds", "Time of a round in this process.", buckets=ROUND_S)
PLAN_AGE = histogram(
    "scheduler_plan_age_seconds",
    "Time from a plan's round to the worker's report that it was applied.",
)
ARRANGED = counter(
    "scheduler_rounds_arranged",
    "Rounds by where they were arranged: in a separate batcher, or in this process because the "
    "batcher was late, unavailable or wrong.",
    "by",
)  # fmt: skip
FALLBACKS = counter(
    "forecast_fallbacks",
    "Forecasts from the scheduler's history, because the predictor's was late, its call failed, "
    "or the circuit breaker is open.",
    "reason",
)  # fmt: skip
REPLACED = counter(
    "forecasts_replaced",
    "Forecasts replaced by better ones: a late answer, or an improved forecast.",
    "by",
)  # fmt: skip
BREAKER = gauge(
    "forecast_breaker",
    "State of the predictor's circuit breaker: closed, open or half_open.",
    "phase",
)  # fmt: skip
ADVICE_DROPPED = counter(
    "advice_dropped",
    "Outcomes and timings dropped because too many waited for an unavailable service.",
    "kind",
)  # fmt: skip

ALL = (
    WAITING, RUNNING, WAITING_FOR, DECISIONS, ADMITTED, MOVES, PREEMPTIONS, REFUSED, SLACK,
    INFEASIBLE, PEAK, WORKERS, WORKERS_LOST, PRESET, ROUND, PLAN_AGE, ARRANGED, FALLBACKS, REPLACED,
    BREAKER, ADVICE_DROPPED,
)  # fmt: skip
