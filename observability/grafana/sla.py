"""SLA: attainment, and the causes of misses."""

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

# Bad from five times the misses that the objective allows.
KEPT = at_least(OBJECTIVE, round(1 - 5 * (1 - OBJECTIVE), 6))
BURNING = up_to(1, BURNS[0].times)
# The default budgets of the classes `interactive` and `standard`.
TTFT, TPOT, MTPOT = up_to(1, 5), up_to(0.05, 0.1), up_to(0.5, 1.5)


def percentiles(title: str, what: str, metric: Metric, limits: Limits, width: int = 8) -> Panel:
    """The 50th, 90th and 99th percentile of a histogram in seconds."""
    lines = (Line(f"p{share}", Q.quantile(share / 100, metric)) for share in (50, 90, 99))
    return plot(title, what, SECONDS, *lines, limits=limits, width=width)


def _p99_by_class(title: str, what: str, metric: Metric, limits: Limits) -> Panel:
    line = Line("{{class}}", Q.quantile(0.99, metric, "class"))
    return plot(title, what, SECONDS, line, limits=limits)


_GLANCE_KEPT = rest(
    Q.increase(g.SLA, where=MISSED, window=WHOLE), Q.increase(g.SLA, where=STAYED, window=WHOLE)
)
GLANCE = Section(
    "At a glance",
    (
        now(
            "SLA attainment",
            "Share of requests that met their SLA over the time range, without disconnected "
            "clients.",
            SHARE,
            Line("kept", _GLANCE_KEPT),
            KEPT,
            whole=True,
        ),
        now(
            "Budget burn, 1 h",
            "How many times too fast the worst class spends the error budget of 30 days. 1: it "
            "lasts exactly.",
            COUNT,
            Line("burn", Q.recorded(BURN_RATES["1h"])),
            BURNING,
        ),
        now(
            "Goodput",
            "Output tokens of requests that met their SLA.",
            TOKENS_S,
            Line("goodput", Q.rate(g.GOODPUT_TOKENS)),
        ),
        now(
            "Goodput share",
            "Share of output tokens whose requests met their SLA.",
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


ATTAINMENT = Section(
    "Attainment",
    (
        plot(
            "SLA attainment by class",
            "Share of requests that met their SLA, without disconnected clients.",
            SHARE,
            Line(
                "{{class}}",
                rest(Q.rate(g.SLA, "class", where=MISSED), Q.rate(g.SLA, "class", where=STAYED)),
            ),
            limits=KEPT,
            top=1,
        ),
        plot(
            "Misses by cause",
            "The stage that missed the SLA: refusal, queue, prefill, preemption, swap-in, "
            "decode, or a disconnected client.",
            REQUESTS_S,
            Line("{{cause}}", Q.rate(g.SLA, "cause", where={"outcome": "missed"})),
            limits=SELDOM,
            stacked=True,
        ),
        bars(
            "Misses by class and cause",
            "Over the time range.",
            COUNT,
            Line(
                "{{class}}: {{cause}}",
                Q.increase(g.SLA, "class", "cause", where={"outcome": "missed"}, window=WHOLE),
            ),
            limits=SELDOM,
        ),
        plot(
            "Budget burn by class",
            "How many times too fast each class spends its 30-day budget, over an hour. Pages "
            f"come at {BURNS[0].times:g} if the last 5 minutes are as bad.",
            COUNT,
            Line("{{class}}", Q.recorded(BURN_RATES["1h"], "class")),
            limits=BURNING,
            width=12,
        ),
        plot(
            "Budget burn by window",
            "The worst class over each alert window.",
            COUNT,
            *(Line(window, Q.recorded(burn)) for window, burn in BURN_RATES.items()),
            limits=BURNING,
            width=12,
        ),
    ),
)


LATENCY = Section(
    "Latency at the clients' sockets",
    (
        percentiles("Time to first token", "From arrival to the first token sent.", g.TTFT, TTFT),
        percentiles("Time per output token", "Mean after the first token.", g.TPOT, TPOT),
        percentiles("Longest gap (MTPOT)", "Longest gap between messages.", g.MTPOT, MTPOT),
        _p99_by_class("TTFT p99 by class", "99 % of requests are faster.", g.TTFT, TTFT),
        _p99_by_class("TPOT p99 by class", "99 % of requests are faster.", g.TPOT, TPOT),
        _p99_by_class("MTPOT p99 by class", "99 % of requests are faster.", g.MTPOT, MTPOT),
        heat(
            "Time between tokens",
            "Per token after the first: the gap before a message divided by its tokens.",
            SECONDS,
            Q.buckets(g.GAP),
        ),
        plot(
            "Time by stage",
            "Mean seconds in the queue, in prefill, and in decode.",
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


TRAFFIC = Section(
    "Traffic",
    (
        plot(
            "Tokens",
            "Output tokens, those of requests that met their SLA, and prompt tokens.",
            TOKENS_S,
            Line("output", Q.rate(g.GENERATION_TOKENS)),
            Line("goodput", Q.rate(g.GOODPUT_TOKENS)),
            Line("prompt", Q.rate(g.PROMPT_TOKENS)),
        ),
        plot(
            "Requests by finish reason",
            "Ended requests, by reason.",
            REQUESTS_S,
            Line("{{finished_reason}}", Q.rate(g.SUCCESS, "finished_reason")),
            stacked=True,
        ),
        plot(
            "Resubmissions",
            "Requests submitted again, by what was lost, and running requests announced to a "
            "new scheduler.",
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
        "SLA attainment, and the causes of misses.",
        GLANCE,
        ATTAINMENT,
        LATENCY,
        TRAFFIC,
    )
