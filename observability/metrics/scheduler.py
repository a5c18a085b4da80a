"""Metrics of the scheduler: its queue, rounds and decisions. Workers export their own memory."""

from observability.metrics.metric import (
    ROUND_S,
    SLACK_S,
    counter,
    gauge,
    histogram,
    invalid_messages,
    metrics_in,
)

WAITING = gauge("scheduler_requests_waiting", "Requests in the scheduler's queue.")
RUNNING = gauge("scheduler_requests_running", "Requests admitted to a worker.")
WAITING_FOR = gauge(
    "scheduler_requests_waiting_for",
    "Queued requests considered by the last round, by reason for waiting.",
    "reason",
)  # fmt: skip
DECISIONS = counter(
    "scheduler_decisions",
    "Decisions of rounds about queued requests, by result: admitted, or the reason for waiting.",
    "reason",
)
ADMITTED = counter("scheduler_admissions", "Admissions of requests, by worker.", "worker")
MOVES = counter(
    "scheduler_moves", "Admissions at another worker than the one that holds the request's KV."
)
PREEMPTIONS = counter(
    "num_preemptions", "Preemptions of running requests, by cause: a plan (paused), lack of memory "
    "at the worker (evicted), or loss of the worker (lost).",
    "cause",
)  # fmt: skip
REFUSED = counter("scheduler_requests_refused", "Refused requests, by reason.", "reason")
SLACK = histogram(
    "slack_at_admission_seconds",
    "Seconds of the TTFT budget left at the first admission; negative if exceeded.",
    "class", buckets=SLACK_S,
)  # fmt: skip
INFEASIBLE = counter(
    "predicted_infeasible",
    "Requests with an expected TTFT above the budget when a round first considers them, from the "
    "queue ahead and the prefill of the request.",
    "class",
)  # fmt: skip
PEAK = gauge(
    "predicted_peak_tokens",
    "Forecast peak of KV tokens, by worker, from the last round that computed it.",
    "worker",
)  # fmt: skip
WORKERS = gauge("workers_attached", "Attached workers.")
WORKERS_LOST = counter("workers_lost", "Worker streams that ended.")
DISPLACED = counter("workers_displaced", "Workers that another worker of the same name displaced.")
SUSPECTED = counter(
    "workers_suspected", "Suspicions of workers that were silent for scheduler.suspect_s."
)
INVALID = invalid_messages("scheduler", "ended its stream")
QUARANTINED = counter(
    "scheduler_quarantined_events",
    "Events that the scheduler failed to apply because of a defect, by kind. Its log has each.",
    "kind",
)
LEADS = gauge("scheduler_leads", "1 while this scheduler leads; 0 for a standby.")
LEADER_CHANGES = counter(
    "scheduler_leader_changes",
    "Changes of the leader that this scheduler saw; none without scheduler.lease_url.",
)
PRESET = gauge("scheduler_preset", "1 for the active preset, by name.", "preset")
ROUND = histogram(
    "scheduler_round_seconds", "Seconds of a round in the scheduler's process.", buckets=ROUND_S
)
PLAN_AGE = histogram(
    "scheduler_plan_age_seconds",
    "Seconds from a plan's round to the worker's report that the plan is applied.",
)
PLAN_INTERVAL = gauge(
    "scheduler_plan_interval_seconds",
    "Mean seconds between rounds through which a request waits, for which slices and memory are "
    "planned; 0 until one has waited.",
)
KV_IDLE = gauge(
    "scheduler_kv_idle_ratio",
    "Free share of the KV blocks while requests wait, by worker, as of its last report; 0 while "
    "none waits.",
    "worker",
)
SLOTS_IDLE = gauge(
    "scheduler_slots_idle_ratio",
    "Free share of the slots while requests wait, by worker; 0 while none waits.",
    "worker",
)
ARRANGED = counter(
    "scheduler_rounds_arranged",
    "Rounds, by arranger: a separate batcher, or this process because the batcher was late, "
    "unavailable or wrong.",
    "by",
)  # fmt: skip
FALLBACKS = counter(
    "forecast_fallbacks",
    "Forecasts taken from the scheduler's history, by reason: the predictor's answer was late, its "
    "call failed, or the circuit breaker is open.",
    "reason",
)  # fmt: skip
REPLACED = counter(
    "forecasts_replaced",
    "Forecasts replaced by a better one, by origin: a late answer, or an improved forecast.",
    "by",
)  # fmt: skip
BREAKER = gauge(
    "forecast_breaker",
    "1 for the current state of the predictor's circuit breaker: closed, open or half_open.",
    "phase",
)  # fmt: skip
ADVICE_DROPPED = counter(
    "advice_dropped",
    "Outcomes and timings dropped because the queue for an unavailable service was full.",
    "kind",
)  # fmt: skip

ALL = metrics_in(globals())
