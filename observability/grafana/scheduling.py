"""Dashboard Scheduling: the queue, reasons for waiting, rounds, placement and refusals."""

from observability.grafana.board import Board, Section
from observability.grafana.parts import (
    COUNT,
    EVENTS_S,
    NEVER,
    REQUESTS_S,
    SECONDS,
    SELDOM,
    SHARE,
    Line,
    Q,
    at_least,
    heat,
    last_value,
    percentiles,
    plot,
    up_to,
)
from observability.metrics import batcher as b
from observability.metrics import gateway as g
from observability.metrics import scheduler as s
from observability.metrics import worker as w
from observability.prometheus.limits import REFUSED_SHARE
from observability.prometheus.promql import ratio
from observability.prometheus.records import REFUSED

BACKLOG, ROUND = up_to(100, 1_000), up_to(0.005, 0.05)

QUEUE = Section(
    "Queue",
    (
        last_value(
            "Preset",
            COUNT,
            Line("{{preset}}", f"{Q.gauge(s.PRESET, 'preset', agg='max')} == 1"),
            "The active preset.",
            named=True,
        ),
        last_value("Waiting", COUNT, Line("waiting", Q.gauge(s.WAITING)), limits=BACKLOG),
        last_value("Admitted", COUNT, Line("admitted", Q.gauge(s.RUNNING))),
        last_value("Workers", COUNT, Line("workers", Q.gauge(s.WORKERS)), limits=at_least(1, 0.5)),
        last_value(
            "Leading schedulers", COUNT, Line("leading", Q.gauge(s.LEADS)), limits=at_least(1, 0.5)
        ),
        last_value(
            "Leader changes",
            EVENTS_S,
            Line("changes", Q.rate(s.LEADER_CHANGES)),
            "Changes of the leader that the schedulers saw.",
            SELDOM,
        ),
        last_value(
            "Refused",
            SHARE,
            Line("refused", Q.recorded(REFUSED)),
            "Share of requests refused because queues were full, over 5 minutes.",
            up_to(0.001, REFUSED_SHARE),
        ),
        last_value(
            "Expected TTFT misses",
            REQUESTS_S,
            Line("expected misses", Q.rate(s.INFEASIBLE)),
            limits=SELDOM,
        ),
        plot(
            "Queue",
            COUNT,
            Line("waiting", Q.gauge(s.WAITING)),
            Line("admitted", Q.gauge(s.RUNNING)),
            limits=BACKLOG,
        ),
        plot(
            "Reasons for waiting",
            COUNT,
            Line("{{reason}}", Q.gauge(s.WAITING_FOR, "reason")),
            stacked=True,
        ),
        plot(
            "Decisions",
            EVENTS_S,
            Line("{{reason}}", Q.rate(s.DECISIONS, "reason")),
            stacked=True,
        ),
        plot("Queue time", SECONDS, *percentiles(50, 90, 99, of=g.QUEUE), limits=up_to(0.5, 2.5)),
        plot(
            "TTFT budget left at admission",
            SECONDS,
            Line("p50, {{class}}", Q.quantile(0.5, s.SLACK, "class")),
            Line("p10, {{class}}", Q.quantile(0.1, s.SLACK, "class")),
            limits=at_least(0.1, 0),
        ),
        plot(
            "Expected TTFT misses by class",
            REQUESTS_S,
            Line("{{class}}", Q.rate(s.INFEASIBLE, "class")),
            limits=SELDOM,
            stacked=True,
        ),
    ),
)


ROUNDS = Section(
    "Rounds",
    (
        plot("Round time", SECONDS, *percentiles(50, 99, of=s.ROUND), limits=ROUND),
        plot(
            "Share of time in rounds",
            SHARE,
            Line("share of the process", Q.summed(s.ROUND)),
            description="Share of time that the scheduler spends in rounds, which "
            "scheduler.round_share bounds.",
            limits=up_to(0.1, 0.5),
        ),
        plot(
            "Age of plans when applied",
            SECONDS,
            *percentiles(50, 99, of=s.PLAN_AGE),
            limits=up_to(0.05, 0.5),
        ),
        plot(
            "Time between plans",
            SECONDS,
            Line("while a request waits", Q.gauge(s.PLAN_INTERVAL, agg="max")),
            limits=up_to(0.1, 0.5),
            width=12,
        ),
        plot(
            "Idle while requests wait",
            SHARE,
            Line("KV of {{worker}}", Q.gauge(s.KV_IDLE, "worker")),
            Line("slots of {{worker}}", Q.gauge(s.SLOTS_IDLE, "worker")),
            description="Free shares of a worker while requests wait. The lesser of both is what "
            "plans leave unused.",
            width=12,
        ),
        plot(
            "Rounds by arranger",
            EVENTS_S,
            Line("{{by}}", Q.rate(s.ARRANGED, "by")),
            stacked=True,
            width=6,
        ),
        plot(
            "Round time of the batcher",
            SECONDS,
            *percentiles(50, 99, of=b.ROUND),
            description=f"{b.ROUND.help} Empty without a separate batcher.",
            limits=ROUND,
            width=6,
        ),
        heat("Round time, distribution", SECONDS, s.ROUND, ROUND, width=6),
        plot(
            "Dropped outcomes and timings",
            EVENTS_S,
            Line("{{kind}}", Q.rate(s.ADVICE_DROPPED, "kind")),
            limits=NEVER,
            width=6,
        ),
    ),
)


PREEMPTION = Section(
    "Preemption and placement",
    (
        plot(
            "Preemptions by cause",
            REQUESTS_S,
            Line("{{cause}}", Q.rate(s.PREEMPTIONS, "cause")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Preemptions per admission",
            COUNT,
            Line("preemptions", ratio(Q.rate(s.PREEMPTIONS), Q.rate(s.ADMITTED))),
            description="Preemptions per admission of a request.",
            limits=up_to(0.5, 2),
        ),
        plot("Moves", REQUESTS_S, Line("moved", Q.rate(s.MOVES)), limits=SELDOM),
        plot(
            "Admissions by worker",
            REQUESTS_S,
            Line("{{worker}}", Q.rate(s.ADMITTED, "worker")),
            stacked=True,
        ),
        plot("Running by worker", COUNT, Line("{{worker}}", Q.gauge(w.RUNNING, "worker"))),
        plot(
            "Memory balance",
            SHARE,
            Line("fullest", Q.gauge(w.USAGE, agg="max")),
            Line("mean", Q.gauge(w.USAGE, agg="avg")),
            Line("emptiest", Q.gauge(w.USAGE, agg="min")),
            description="Share of KV blocks held by requests: the fullest worker, the mean, and "
            "the emptiest worker. Placement is unbalanced where they are far apart.",
            limits=up_to(0.9, 0.98),
            top=1,
        ),
    ),
)


REFUSALS = Section(
    "Refusals and workers",
    (
        plot(
            "Refused by the scheduler",
            REQUESTS_S,
            Line("{{reason}}", Q.rate(s.REFUSED, "reason")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Refused by gateways before parsing",
            REQUESTS_S,
            Line("{{reason}}", Q.rate(g.REFUSALS, "reason")),
            description=f"{g.REFUSALS.help} Limits: running requests, queue length, unreachable "
            "deadline, or arrival rate.",
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Workers",
            COUNT,
            Line("attached", Q.gauge(s.WORKERS)),
            Line("lost", Q.increase(s.WORKERS_LOST, window="15m")),
            description="Attached workers, and worker streams that ended in the last 15 minutes.",
            limits=at_least(1, 0.5),
        ),
        plot(
            "Shared limits of API keys",
            COUNT,
            Line("shared", Q.gauge(g.LIMITS_SHARED, agg="min")),
            description=f"{g.LIMITS_SHARED.help} The least of all gateways.",
            limits=at_least(1, 0.5),
        ),
        plot(
            "Missing processes",
            COUNT,
            Line("missing", Q.gauge(g.PEERS_MISSING, agg="max")),
            description=f"{g.PEERS_MISSING.help} All panels lack their metrics.",
            limits=up_to(0.5, 1),
        ),
    ),
)


BOARD = Board(
    "Scheduling",
    "The queue and reasons for waiting, rounds, preemption, placement and refusals.",
    (QUEUE, ROUNDS, PREEMPTION, REFUSALS),
)
