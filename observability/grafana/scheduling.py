"""Scheduling: who waits and for what, how rounds are made, and where requests go."""

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


def _queue() -> Section:
    return Section(
        "Queue",
        (
            now(
                "Preset",
                "The row of policies that decides.",
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
                "Requests that have a place at a worker.",
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
                "Turned away",
                "Share of what clients asked for that was refused because too much waited, over 5 "
                "minutes.",
                SHARE,
                Line("turned away", Q.recorded(REFUSED)),
                up_to(0.001, REFUSED_SHARE),
            ),
            now(
                "Foreseen too late",
                "Requests whose TTFT budget was foreseen not to hold when they came.",
                REQUESTS_S,
                Line("too late", Q.rate(s.INFEASIBLE)),
                SELDOM,
            ),
            plot(
                "Queue",
                "Requests that wait, and that have a place.",
                COUNT,
                Line("waiting", Q.gauge(s.WAITING)),
                Line("admitted", Q.gauge(s.RUNNING)),
                limits=up_to(100, 1_000),
            ),
            plot(
                "What they wait for",
                "Requests in the queue that the last round looked at, by the reason it gave.",
                COUNT,
                Line("{{reason}}", Q.gauge(s.WAITING_FOR, "reason")),
                stacked=True,
            ),
            plot(
                "Decisions",
                "Waiting requests that rounds looked at, by what was said of them.",
                EVENTS_S,
                Line("{{reason}}", Q.rate(s.DECISIONS, "reason")),
                stacked=True,
            ),
            plot(
                "Time to a place",
                "From arrival to placement, as gateways saw it.",
                SECONDS,
                *(Line(f"p{p}", Q.quantile(p / 100, g.QUEUE)) for p in (50, 90, 99)),
                limits=up_to(0.5, 2.5),
            ),
            plot(
                "TTFT budget left at admission",
                "The half, and the tenth with least, have this much of their TTFT budget left when "
                "they get a place. Below 0 it was over.",
                SECONDS,
                Line("half, {{class}}", Q.quantile(0.5, s.SLACK, "class")),
                Line("a tenth, {{class}}", Q.quantile(0.1, s.SLACK, "class")),
                limits=at_least(0.1, 0),
            ),
            plot(
                "Foreseen too late by class",
                "Requests whose TTFT budget was foreseen not to hold when a round first saw them.",
                REQUESTS_S,
                Line("{{class}}", Q.rate(s.INFEASIBLE, "class")),
                limits=SELDOM,
                stacked=True,
            ),
        ),
    )


def _rounds() -> Section:
    return Section(
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
                "Rounds and their share of the time",
                "Seconds a second spent in rounds; events gather meanwhile, and "
                "scheduler.round_share bounds it.",
                SHARE,
                Line("share of the process", Q.summed(s.ROUND)),
                limits=up_to(0.1, 0.5),
            ),
            plot(
                "Age of a plan when applied",
                "From a plan's round until its worker said it was applied.",
                SECONDS,
                *(Line(f"p{p}", Q.quantile(p / 100, s.PLAN_AGE)) for p in (50, 99)),
                limits=up_to(0.05, 0.5),
            ),
            plot(
                "Rounds by who arranged them",
                "A batcher of its own, or the scheduler because that was late, gone or wrong.",
                EVENTS_S,
                Line("{{by}}", Q.rate(s.ARRANGED, "by")),
                stacked=True,
                width=6,
            ),
            plot(
                "The batcher's time of a round",
                "To parse, arrange and answer; only where the batcher is a process of its own.",
                SECONDS,
                *(Line(f"p{p}", Q.quantile(p / 100, b.ROUND)) for p in (50, 99)),
                limits=up_to(0.005, 0.05),
                width=6,
            ),
            heat(
                "Times of rounds",
                "How the times of rounds are spread.",
                SECONDS,
                Q.buckets(s.ROUND),
                up_to(0.005, 0.05),
                width=6,
            ),
            plot(
                "Advice that never arrived",
                "Outcomes and timings not told because too many waited for a service that is away.",
                EVENTS_S,
                Line("{{kind}}", Q.rate(s.ADVICE_DROPPED, "kind")),
                limits=NEVER,
                width=6,
            ),
        ),
    )


def _preemption() -> Section:
    return Section(
        "Preemption and placement",
        (
            plot(
                "Preemptions by cause",
                "Requests stopped before their end: by a plan (paused), by their worker for want "
                "of memory (evicted), or with it (lost).",
                REQUESTS_S,
                Line("{{cause}}", Q.rate(s.PREEMPTIONS, "cause")),
                limits=SELDOM,
                stacked=True,
            ),
            plot(
                "Preemptions an admission",
                "How often a request that gets a place is stopped again.",
                COUNT,
                Line("stops", ratio(Q.rate(s.PREEMPTIONS), Q.rate(s.ADMITTED))),
                limits=up_to(0.5, 2),
            ),
            plot(
                "Moves",
                "Requests whose KV rested at one worker and that were begun at another.",
                REQUESTS_S,
                Line("moved", Q.rate(s.MOVES)),
                limits=SELDOM,
            ),
            plot(
                "Admissions by worker",
                "Requests given a place.",
                REQUESTS_S,
                Line("{{worker}}", Q.rate(s.ADMITTED, "worker")),
                stacked=True,
            ),
            plot(
                "Running by worker",
                "Requests admitted and not finished, as workers count them.",
                COUNT,
                Line("{{worker}}", Q.gauge(w.RUNNING, "worker")),
            ),
            plot(
                "Balance of memory",
                "The fullest worker's KV, the mean, and the emptiest's: far apart, placing is "
                "unbalanced.",
                SHARE,
                *(Line(name, Q.gauge(w.USAGE, how=how)) for name, how in _SPREAD),
                limits=up_to(0.9, 0.98),
                top=1,
            ),
        ),
    )


_SPREAD = (("fullest", "max"), ("mean", "avg"), ("emptiest", "min"))


def _refusals() -> Section:
    return Section(
        "Refusals and workers",
        (
            plot(
                "Refused by the scheduler",
                "By the reason.",
                REQUESTS_S,
                Line("{{reason}}", Q.rate(s.REFUSED, "reason")),
                limits=SELDOM,
                stacked=True,
            ),
            plot(
                "Refused unread by gateways",
                "By what stood in the way: live choices, the queue, a deadline that can't be met, "
                "or too many arriving at once.",
                REQUESTS_S,
                Line("{{bar}}", Q.rate(g.REFUSALS, "bar")),
                limits=SELDOM,
                stacked=True,
            ),
            plot(
                "Workers",
                "Attached now, and how often one's stream ended in the last 15 minutes.",
                COUNT,
                Line("attached", Q.gauge(s.WORKERS)),
                Line("lost", Q.increase(s.WORKERS_LOST, window="15m")),
                limits=at_least(1, 0.5),
            ),
            plot(
                "Processes not heard of",
                "Peers whose metrics the gateway's last scrape did not get in time: what they "
                "count is missing from all panels.",
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
        _queue(),
        _rounds(),
        _preemption(),
        _refusals(),
    )
