"""Dashboard Picker: the requests that the endpoint picker places, and its endpoints."""

from observability.grafana.board import Board, Section
from observability.grafana.parts import (
    COUNT,
    EVENTS_S,
    NEVER,
    REQUESTS_S,
    SECONDS,
    SELDOM,
    TOKENS_S,
    Line,
    Q,
    percentiles,
    plot,
    up_to,
)
from observability.metrics import picker as p

REQUESTS = Section(
    "Requests",
    (
        plot("Picks by endpoint", REQUESTS_S, Line("{{endpoint}}", Q.rate(p.PICKS, "endpoint"))),
        plot("In flight", COUNT, Line("in flight", Q.gauge(p.IN_FLIGHT))),
        plot(
            "Refused by cause",
            REQUESTS_S,
            Line("{{cause}}", Q.rate(p.REFUSED, "cause")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Ended by result",
            REQUESTS_S,
            Line("{{result}}", Q.rate(p.ENDED, "result")),
            stacked=True,
        ),
        plot("Output tokens", TOKENS_S, Line("output", Q.rate(p.TOKENS))),
        plot("Prompt tokens expected to be cached", TOKENS_S, Line("cached", Q.rate(p.CACHED))),
    ),
)

TIMES = Section(
    "Times",
    (
        plot("Time to pick", SECONDS, *percentiles(50, 99, of=p.PICK), limits=up_to(0.005, 0.05)),
        plot("TTFT, streamed", SECONDS, *percentiles(50, 99, of=p.TTFT), limits=up_to(1, 5)),
        plot("TTFT, expected", SECONDS, *percentiles(50, 99, of=p.FORESEEN), limits=up_to(1, 5)),
    ),
)

SOURCES = Section(
    "Endpoints and forecasts",
    (
        plot(
            "Endpoints by health",
            COUNT,
            Line("{{health}}", Q.gauge(p.ENDPOINTS, "health")),
            stacked=True,
        ),
        plot("Scrapes by result", EVENTS_S, Line("{{result}}", Q.rate(p.SCRAPES, "result"))),
        plot(
            "Forecasts without the predictor, and dropped outcomes",
            EVENTS_S,
            Line("{{reason}}", Q.rate(p.FALLBACKS, "reason")),
            Line("dropped outcomes", Q.rate(p.OUTCOMES_DROPPED)),
            limits=NEVER,
        ),
        plot(
            "Invalid messages",
            COUNT,
            Line(
                "{{method}}: {{field}}",
                Q.increase(p.INVALID, "method", "field", window="15m"),
            ),
            description="Messages of the proxy that do not fit the protocol, in the last 15 "
            "minutes. Its processing_mode may be another one.",
            limits=SELDOM,
        ),
    ),
)

BOARD = Board(
    "Picker",
    "Requests that the endpoint picker (`foretoken epp`) places, and its endpoints. Model and "
    "worker do not filter it.",
    (REQUESTS, TIMES, SOURCES),
)
