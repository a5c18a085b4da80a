"""SLA: is what was agreed kept, and if not, what breaks it?"""

from grafana_foundation_sdk.models.dashboard import Dashboard

from observability.grafana.board import Section, board
from observability.grafana.parts import (
    ACTIVITY,
    COUNT,
    REQUESTS_S,
    SECONDS,
    SELDOM,
    SHARE,
    TOKENS_S,
    WHOLE,
    Limits,
    Line,
    Panel,
    Q,
    at_least,
    bars,
    heat,
    now,
    plot,
    up_to,
)
from observability.metrics import gateway as g
from observability.metrics.metric import Metric
from observability.prometheus.limits import BURNS, OBJECTIVE
from observability.prometheus.promql import rest, share
from observability.prometheus.records import BURN_RATES, MISSED, STAYED

# Bad from five times the misses on that the objective allows.
KEPT = at_least(OBJECTIVE, round(1 - 5 * (1 - OBJECTIVE), 6))
BURNING = up_to(1, BURNS[0].times)
# Budgets of the classes `interactive` and `standard`, where nothing else is set.
TTFT, TPOT, MTPOT = up_to(1, 5), up_to(0.05, 0.1), up_to(0.5, 1.5)


def percentiles(title: str, what: str, metric: Metric, limits: Limits, width: int = 8) -> Panel:
    """The 50th, 90th and 99th of a histogram in seconds."""
    lines = (Line(f"p{share}", Q.quantile(share / 100, metric)) for share in (50, 90, 99))
    return plot(title, what, SECONDS, *lines, limits=limits, width=width)


def _p99_by_class(title: str, what: str, metric: Metric, limits: Limits) -> Panel:
    line = Line("{{class}}", Q.quantile(0.99, metric, "class"))
    return plot(title, what, SECONDS, line, limits=limits)


def _now() -> Section:
    kept = rest(
        Q.increase(g.SLA, where=MISSED, window=WHOLE), Q.increase(g.SLA, where=STAYED, window=WHOLE)
    )
    return Section(
        "At a glance",
        (
            now(
                "SLAs kept",
                "Share of the requests of the time shown whose SLA was kept; those whose client "
                "left count neither way.",
                SHARE,
                Line("kept", kept),
                KEPT,
                whole=True,
            ),
            now(
                "Budget burn, 1 h",
                "How many times too fast the worst class uses up the misses that 30 days allow. "
                "1: the budget lasts exactly.",
                COUNT,
                Line("burn", Q.recorded(BURN_RATES["1h"])),
                BURNING,
            ),
            now(
                "Goodput",
                "Output tokens of requests whose SLA was kept.",
                TOKENS_S,
                Line("goodput", Q.rate(g.GOODPUT_TOKENS)),
            ),
            now(
                "Tokens of use",
                "Share of all output tokens that were of requests whose SLA was kept.",
                SHARE,
                Line("of use", share(Q.rate(g.GOODPUT_TOKENS), Q.rate(g.GENERATION_TOKENS))),
                at_least(0.95, 0.8),
            ),
            now(
                "Running",
                "Choices placed on a worker, as gateways count them.",
                COUNT,
                Line("running", Q.gauge(g.RUNNING)),
            ),
            now(
                "Waiting",
                "Choices not placed yet, as gateways count them.",
                COUNT,
                Line("waiting", Q.gauge(g.WAITING)),
                up_to(100, 1_000),
            ),
        ),
    )


def _attainment() -> Section:
    return Section(
        "Attainment",
        (
            plot(
                "SLAs kept by class",
                "Share of requests that kept their SLA, of those whose client stayed.",
                SHARE,
                Line(
                    "{{class}}",
                    rest(
                        Q.rate(g.SLA, "class", where=MISSED), Q.rate(g.SLA, "class", where=STAYED)
                    ),
                ),
                limits=KEPT,
                top=1,
            ),
            plot(
                "Misses by cause",
                "Which stage broke the SLA: refused, waiting for a place, prefill, preemption, KV "
                "coming back, decode, or the client who left.",
                REQUESTS_S,
                Line("{{cause}}", Q.rate(g.SLA, "cause", where={"outcome": "missed"})),
                limits=SELDOM,
                stacked=True,
            ),
            bars(
                "Misses by class and cause",
                "Of the time shown.",
                COUNT,
                Line(
                    "{{class}}: {{cause}}",
                    Q.increase(g.SLA, "class", "cause", where={"outcome": "missed"}, window=WHOLE),
                ),
                limits=SELDOM,
            ),
            plot(
                "Budget burn by class",
                "How many times too fast each class uses up 30 days' misses, over an hour. Pages "
                f"come at {BURNS[0].times:g} if the last 5 minutes are as bad.",
                COUNT,
                Line("{{class}}", Q.recorded(BURN_RATES["1h"], "class")),
                limits=BURNING,
                width=12,
            ),
            plot(
                "Budget burn by window",
                "The worst class over each window that alerts look at.",
                COUNT,
                *(Line(window, Q.recorded(burn)) for window, burn in BURN_RATES.items()),
                limits=BURNING,
                width=12,
            ),
        ),
    )


def _latency() -> Section:
    return Section(
        "Latency, as clients' sockets saw it",
        (
            percentiles(
                "Time to first token", "From arrival to the first token, sent.", g.TTFT, TTFT
            ),
            percentiles(
                "Time per output token", "A request's mean after its first token.", g.TPOT, TPOT
            ),
            percentiles(
                "Longest gap (MTPOT)", "A request's longest wait for more tokens.", g.MTPOT, MTPOT
            ),
            _p99_by_class("TTFT p99 by class", "99 % of requests are faster.", g.TTFT, TTFT),
            _p99_by_class("TPOT p99 by class", "99 % of requests are faster.", g.TPOT, TPOT),
            _p99_by_class("MTPOT p99 by class", "99 % of requests are faster.", g.MTPOT, MTPOT),
            heat(
                "Time between tokens",
                "Each token after a request's first message: the gap before its message, over the "
                "message's tokens.",
                SECONDS,
                Q.buckets(g.GAP),
            ),
            plot(
                "Where the time goes",
                "Mean seconds of a request until its place, from there to its first token, and "
                "from there to its last.",
                SECONDS,
                Line("queue", Q.mean(g.QUEUE)),
                Line("prefill", Q.mean(g.PREFILL)),
                Line("decode", Q.mean(g.DECODE)),
                limits=ACTIVITY,
                stacked=True,
            ),
            percentiles("End to end", "From arrival to the end.", g.E2E, up_to(30, 120)),
        ),
    )


def _traffic() -> Section:
    return Section(
        "Traffic",
        (
            plot(
                "Tokens",
                "Output tokens that reached gateways, those of them whose request kept its SLA, "
                "and prompt tokens taken in.",
                TOKENS_S,
                Line("output", Q.rate(g.GENERATION_TOKENS)),
                Line("goodput", Q.rate(g.GOODPUT_TOKENS)),
                Line("prompt", Q.rate(g.PROMPT_TOKENS)),
            ),
            plot(
                "Requests by ending",
                "Requests that ended, by why.",
                REQUESTS_S,
                Line("{{finished_reason}}", Q.rate(g.SUCCESS, "finished_reason")),
                stacked=True,
            ),
            plot(
                "Begun again",
                "Requests submitted again because a part of them was lost (by what), and those a "
                "new scheduler was told of while they went on.",
                REQUESTS_S,
                Line("lost: {{cause}}", Q.rate(g.RESUBMISSIONS, "cause")),
                Line("announced", Q.rate(g.ANNOUNCEMENTS)),
                limits=SELDOM,
            ),
        ),
    )


def dashboard() -> Dashboard:
    """Goodput, attainment by class, misses by cause, and latencies."""
    return board(
        "SLA",
        "Are SLAs kept, and what breaks them.",
        _now(),
        _attainment(),
        _latency(),
        _traffic(),
    )
