"""Sections of dashboard Forecasts: embedding, learning, CPU use, and the outcome log."""

from observability.grafana.board import Section
from observability.grafana.parts import (
    COUNT,
    EVENTS_S,
    NEVER,
    SECONDS,
    SELDOM,
    SHARE,
    Line,
    Q,
    at_least,
    percentiles,
    plot,
    up_to,
)
from observability.metrics import predictor as p

PREDICTOR = Section(
    "Predictor",
    (
        plot(
            "Time to forecast",
            SECONDS,
            *percentiles(50, 99, of=p.FORECAST),
            limits=up_to(0.01, 0.05),
        ),
        plot(
            "Time to the improved forecast",
            SECONDS,
            *percentiles(50, 99, of=p.READING_LAG),
            limits=up_to(0.5, 2),
        ),
        plot(
            "Queued prompts",
            COUNT,
            Line("running", Q.gauge(p.UNREAD)),
            Line("ended", Q.gauge(p.UNREAD_ENDED)),
            limits=up_to(100, 1_000),
        ),
        plot("Embedded prompts", EVENTS_S, Line("{{of}}", Q.rate(p.READ, "of")), stacked=True),
        plot(
            "CPU use",
            SHARE,
            Line("core", Q.gauge(p.CPU_SHARE, agg="max")),
            limits=up_to(0.5, 0.9),
        ),
        plot(
            "Dropped",
            EVENTS_S,
            Line("prompts", Q.rate(p.UNREAD_DROPPED)),
            Line("improved forecasts", Q.rate(p.IMPROVED_DROPPED)),
            Line("pending requests", Q.rate(p.PENDING_DROPPED)),
            limits=SELDOM,
        ),
        plot(
            "Outcomes",
            EVENTS_S,
            Line("learned: {{learnt}}", Q.rate(p.OUTCOMES, "learnt")),
            Line("left out: {{field}}", Q.rate(p.OUTCOMES_IMPLAUSIBLE, "field")),
            stacked=True,
        ),
        plot("Fits by result", EVENTS_S, Line("{{result}}", Q.rate(p.REFITS, "result"))),
        plot("Fit time, mean", SECONDS, Line("fit", Q.mean(p.REFIT)), limits=up_to(60, 300)),
        plot(
            "Age of the model",
            SECONDS,
            Line("age", Q.gauge(p.MODEL_AGE, agg="max")),
            limits=up_to(86_400, 604_800),
        ),
        plot(
            "Examples, fits and pending requests",
            COUNT,
            Line("examples", Q.gauge(p.EXAMPLES, agg="max")),
            Line("adopted fits", Q.gauge(p.MODEL_VERSION, agg="max")),
            Line("pending", Q.gauge(p.PENDING)),
        ),
        plot("Listeners", COUNT, Line("listeners", Q.gauge(p.LISTENERS)), limits=at_least(1, 0.5)),
    ),
)


OUTCOME_LOG = Section(
    "Outcome log",
    (
        plot(
            "Written and read",
            EVENTS_S,
            Line("written", Q.rate(p.LOG_WRITTEN)),
            Line("read", Q.rate(p.LOG_DELIVERED)),
        ),
        plot("Queued", COUNT, Line("queued", Q.gauge(p.LOG_PENDING)), limits=up_to(256, 4_096)),
        plot(
            "Dropped and skipped",
            EVENTS_S,
            Line("not written", Q.rate(p.LOG_DROPPED)),
            Line("unusable", Q.rate(p.LOG_UNREADABLE)),
            Line("of a newer version", Q.rate(p.LOG_FROM_FUTURE)),
            limits=SELDOM,
        ),
        plot(
            "Unavailable",
            COUNT,
            Line("unavailable", Q.gauge(p.LOG_UNAVAILABLE, agg="max")),
            limits=NEVER,
            top=1,
        ),
    ),
)
