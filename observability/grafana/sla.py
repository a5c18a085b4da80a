"""Dashboard SLA: attainment, causes of misses, goodput and latencies."""

from observability.grafana.board import Board, Section
from observability.grafana.parts import (
    ACTIVITY,
    COUNT,
    REQUESTS_S,
    SECONDS,
    SELDOM,
    SHARE,
    TIME_RANGE,
    TOKENS_S,
    Limits,
    Line,
    Panel,
    Q,
    at_least,
    bars,
    heat,
    last_value,
    percentiles,
    plot,
    up_to,
)
from observability.metrics import gateway as g
from observability.metrics.metric import Metric
from observability.prometheus.limits import BURNS, OBJECTIVE
from observability.prometheus.promql import complement, share
from observability.prometheus.records import BURN_RATES, CONNECTED, MISSED

# Bad from five times the misses that the objective allows.
MET = at_least(OBJECTIVE, round(1 - 5 * (1 - OBJECTIVE), 6))
BURNING = up_to(1, BURNS[0].times)
# The default budgets of the classes `interactive` and `standard`.
TTFT, TPOT, MTPOT = up_to(1, 5), up_to(0.05, 0.1), up_to(0.5, 1.5)
ATTAINED = "Share of requests that met their SLA; requests of disconnected clients are not counted."
BURN = (
    "Spending of the 30-day error budget, as a multiple of the rate that spends exactly all of it"
)


def _by_class(title: str, metric: Metric, limits: Limits) -> Panel:
    line = Line("{{class}}", Q.quantile(0.99, metric, "class"))
    return plot(title, SECONDS, line, limits=limits)


GLANCE = Section(
    "At a glance",
    (
        last_value(
            "SLA attainment",
            SHARE,
            Line(
                "met",
                complement(
                    Q.increase(g.SLA, where=MISSED, window=TIME_RANGE),
                    Q.increase(g.SLA, where=CONNECTED, window=TIME_RANGE),
                ),
            ),
            f"{ATTAINED} Over the time range.",
            MET,
            whole=True,
        ),
        last_value(
            "Budget burn, 1 h",
            COUNT,
            Line("burn", Q.recorded(BURN_RATES["1h"])),
            f"{BURN}. The worst class, over one hour.",
            BURNING,
        ),
        last_value("Goodput", TOKENS_S, Line("goodput", Q.rate(g.GOODPUT_TOKENS))),
        last_value(
            "Goodput share",
            SHARE,
            Line("goodput", share(Q.rate(g.GOODPUT_TOKENS), Q.rate(g.GENERATION_TOKENS))),
            "Share of output tokens that belong to requests that met their SLA.",
            at_least(0.95, 0.8),
        ),
        last_value("Running", COUNT, Line("running", Q.gauge(g.RUNNING))),
        last_value("Waiting", COUNT, Line("waiting", Q.gauge(g.WAITING)), limits=up_to(100, 1_000)),
    ),
)


ATTAINMENT = Section(
    "Attainment",
    (
        plot(
            "SLA attainment by class",
            SHARE,
            Line(
                "{{class}}",
                complement(
                    Q.rate(g.SLA, "class", where=MISSED), Q.rate(g.SLA, "class", where=CONNECTED)
                ),
            ),
            description=ATTAINED,
            limits=MET,
            top=1,
        ),
        plot(
            "Misses by cause",
            REQUESTS_S,
            Line("{{cause}}", Q.rate(g.SLA, "cause", where={"outcome": "missed"})),
            limits=SELDOM,
            stacked=True,
        ),
        bars(
            "Misses by class and cause",
            COUNT,
            Line(
                "{{class}}: {{cause}}",
                Q.increase(g.SLA, "class", "cause", where={"outcome": "missed"}, window=TIME_RANGE),
            ),
            description="Requests that missed their SLA over the time range.",
            limits=SELDOM,
        ),
        plot(
            "Budget burn by class",
            COUNT,
            Line("{{class}}", Q.recorded(BURN_RATES["1h"], "class")),
            description=f"{BURN}, over one hour. An alert pages at {BURNS[0].times:g} if the burn "
            "over the last 5 minutes is as high.",
            limits=BURNING,
            width=12,
        ),
        plot(
            "Budget burn by window",
            COUNT,
            *(Line(window, Q.recorded(burn)) for window, burn in BURN_RATES.items()),
            description=f"{BURN}. The worst class over each window of an alert.",
            limits=BURNING,
            width=12,
        ),
    ),
)


LATENCY = Section(
    "Latency at the clients' sockets",
    (
        plot("Time to first token", SECONDS, *percentiles(50, 90, 99, of=g.TTFT), limits=TTFT),
        plot("Time per output token", SECONDS, *percentiles(50, 90, 99, of=g.TPOT), limits=TPOT),
        plot("Longest gap (MTPOT)", SECONDS, *percentiles(50, 90, 99, of=g.MTPOT), limits=MTPOT),
        plot(
            "Time to first content",
            SECONDS,
            *percentiles(50, 90, 99, of=g.FIRST_CONTENT),
            description="Reasoning and tool calls come before it.",
            limits=TTFT,
        ),
        _by_class("TTFT p99 by class", g.TTFT, TTFT),
        _by_class("TPOT p99 by class", g.TPOT, TPOT),
        _by_class("MTPOT p99 by class", g.MTPOT, MTPOT),
        heat("Time between tokens", SECONDS, g.GAP),
        plot(
            "Time by stage",
            SECONDS,
            Line("queue", Q.mean(g.QUEUE)),
            Line("prefill", Q.mean(g.PREFILL)),
            Line("decode", Q.mean(g.DECODE)),
            description="Mean seconds of a request in the queue, in prefill and in decode.",
            limits=ACTIVITY,
            stacked=True,
        ),
        plot("End to end", SECONDS, *percentiles(50, 90, 99, of=g.E2E), limits=up_to(30, 120)),
    ),
)


TRAFFIC = Section(
    "Traffic",
    (
        plot(
            "Tokens",
            TOKENS_S,
            Line("output", Q.rate(g.GENERATION_TOKENS)),
            Line("goodput", Q.rate(g.GOODPUT_TOKENS)),
            Line("prompt", Q.rate(g.PROMPT_TOKENS)),
        ),
        plot(
            "Requests by finish reason",
            REQUESTS_S,
            Line("{{finished_reason}}", Q.rate(g.SUCCESS, "finished_reason")),
            stacked=True,
        ),
        plot(
            "Resubmissions",
            REQUESTS_S,
            Line("lost: {{cause}}", Q.rate(g.RESUBMISSIONS, "cause")),
            Line("announced", Q.rate(g.ANNOUNCEMENTS)),
            limits=SELDOM,
        ),
    ),
)


BOARD = Board(
    "SLA",
    "SLA attainment, causes of misses, goodput and latencies.",
    (GLANCE, ATTAINMENT, LATENCY, TRAFFIC),
)
