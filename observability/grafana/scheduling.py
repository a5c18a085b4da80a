"""Scheduling: the queue and its reasons, rounds, and placement."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from observability.grafana.board import Section, board
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
    now,
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

QUEUE = Section(
    "Queue",
    (
        now(
            "Preset",
            "The active preset.",
            COUNT,
            Line("{{preset}}", f"{Q.gauge(s.PRESET, 'preset', how='max')} == 1"),
            named=True,
        ),
        now(
            "Waiting",
            "Requests in the scheduler's queue.",
            COUNT,
            Line("waiting", Q.gauge(s.WAITING)),
            up_to(100, 1_000),
        ),
        now(
            "Admitted",
            "Requests admitted to a worker.",
            COUNT,
            Line("admitted", Q.gauge(s.RUNNING)),
        ),
        now(
            "Workers",
            "Workers attached to the scheduler.",
            COUNT,
            Line("workers", Q.gauge(s.WORKERS)),
            at_least(1, 0.5),
        ),
        now(
            "Refused",
            "Share of requests refused because queues were full, over 5 minutes.",
            SHARE,
            Line("turned away", Q.recorded(REFUSED)),
            up_to(0.001, REFUSED_SHARE),
        ),
        now(
            "Expected TTFT misses",
            "Requests expected to miss their TTFT budget.",
            REQUESTS_S,
            Line("too late", Q.rate(s.INFEASIBLE)),
            SELDOM,
        ),
        plot(
            "Queue",
            "Waiting and admitted requests.",
            COUNT,
            Line("waiting", Q.gauge(s.WAITING)),
            Line("admitted", Q.gauge(s.RUNNING)),
            limits=up_to(100, 1_000),
        ),
        plot(
            "Wait reasons",
            "Queued requests considered by the last round, by reason.",
            COUNT,
            Line("{{reason}}", Q.gauge(s.WAITING_FOR, "reason")),
            stacked=True,
        ),
        plot(
            "Decisions",
            "Waiting requests considered by rounds, by decision.",
            EVENTS_S,
            Line("{{reason}}", Q.rate(s.DECISIONS, "reason")),
            stacked=True,
        ),
        plot(
            "Queue time",
            "From arrival to placement, as gateways measure it.",
            SECONDS,
            *(Line(f"p{p}", Q.quantile(p / 100, g.QUEUE)) for p in (50, 90, 99)),
            limits=up_to(0.5, 2.5),
        ),
        plot(
            "TTFT budget left at admission",
            "Median and 10th percentile of the TTFT budget left at admission. Negative: exceeded.",
            SECONDS,
            Line("half, {{class}}", Q.quantile(0.5, s.SLACK, "class")),
            Line("a tenth, {{class}}", Q.quantile(0.1, s.SLACK, "class")),
            limits=at_least(0.1, 0),
        ),
        plot(
            "Expected TTFT misses by class",
            "Requests expected to miss their TTFT budget when a round first considered them.",
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
        plot(
            "Time of a round",
            "In the scheduler's process.",
            SECONDS,
            *(Line(f"p{p}", Q.quantile(p / 100, s.ROUND)) for p in (50, 99)),
            limits=up_to(0.005, 0.05),
        ),
        plot(
            "Share of time in rounds",
            "Share of time spent in rounds, bounded by scheduler.round_share.",
            SHARE,
            Line("share of the process", Q.summed(s.ROUND)),
            limits=up_to(0.1, 0.5),
        ),
        plot(
            "Age of a plan when applied",
            "From a plan's round to the worker's report that it was applied.",
            SECONDS,
            *(Line(f"p{p}", Q.quantile(p / 100, s.PLAN_AGE)) for p in (50, 99)),
            limits=up_to(0.05, 0.5),
        ),
        plot(
            "Rounds by arranger",
            "The batcher, or the scheduler because the batcher was late, unavailable or wrong.",
            EVENTS_S,
            Line("{{by}}", Q.rate(s.ARRANGED, "by")),
            stacked=True,
            width=6,
        ),
        plot(
            "The batcher's time of a round",
            "To parse, arrange and answer; only with a separate batcher.",
            SECONDS,
            *(Line(f"p{p}", Q.quantile(p / 100, b.ROUND)) for p in (50, 99)),
            limits=up_to(0.005, 0.05),
            width=6,
        ),
        heat(
            "Times of rounds",
            "Distribution of round times.",
            SECONDS,
            Q.buckets(s.ROUND),
            up_to(0.005, 0.05),
            width=6,
        ),
        plot(
            "Dropped outcomes and timings",
            "Outcomes and timings dropped because too many waited for an unavailable service.",
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
            "Preempted requests: by a plan (paused), for lack of memory (evicted), or with the "
            "worker (lost).",
            REQUESTS_S,
            Line("{{cause}}", Q.rate(s.PREEMPTIONS, "cause")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Preemptions per admission",
            "How often an admitted request is preempted.",
            COUNT,
            Line("stops", ratio(Q.rate(s.PREEMPTIONS), Q.rate(s.ADMITTED))),
            limits=up_to(0.5, 2),
        ),
        plot(
            "Moves",
            "Requests with KV on one worker that were admitted at another.",
            REQUESTS_S,
            Line("moved", Q.rate(s.MOVES)),
            limits=SELDOM,
        ),
        plot(
            "Admissions by worker",
            "Admitted requests.",
            REQUESTS_S,
            Line("{{worker}}", Q.rate(s.ADMITTED, "worker")),
            stacked=True,
        ),
        plot(
            "Running by worker",
            "Requests admitted and not finished, as workers report them.",
            COUNT,
            Line("{{worker}}", Q.gauge(w.RUNNING, "worker")),
        ),
        plot(
            "Balance of memory",
            "KV usage of the fullest worker, the mean, and of the emptiest: far apart means "
            "unbalanced placement.",
            SHARE,
            Line("fullest", Q.gauge(w.USAGE, how="max")),
            Line("mean", Q.gauge(w.USAGE, how="avg")),
            Line("emptiest", Q.gauge(w.USAGE, how="min")),
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
            "By reason.",
            REQUESTS_S,
            Line("{{reason}}", Q.rate(s.REFUSED, "reason")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Refused unread by gateways",
            "By limit: live choices, the queue, an unreachable deadline, or too many arrivals "
            "at once.",
            REQUESTS_S,
            Line("{{reason}}", Q.rate(g.REFUSALS, "reason")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Workers",
            "Attached workers, and streams ended in the last 15 minutes.",
            COUNT,
            Line("attached", Q.gauge(s.WORKERS)),
            Line("lost", Q.increase(s.WORKERS_LOST, window="15m")),
            limits=at_least(1, 0.5),
        ),
        plot(
            "Missing processes",
            "Peers missing in the gateway's last scrape: all panels lack their metrics.",
            COUNT,
            Line("missing", Q.gauge(g.PEERS_MISSING, how="max")),
            limits=up_to(0.5, 1),
        ),
    ),
)


def dashboard() -> Dashboard:
    """Queue, rounds, preemption, placement and refusals."""
    return board(
        "Scheduling",
        "Who waits and for what, how rounds are made, and where requests go.",
        QUEUE,
        ROUNDS,
        PREEMPTION,
        REFUSALS,
    )
