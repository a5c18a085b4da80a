"""The predictor's reading, learning, cost, and outcome log."""

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
    plot,
    up_to,
)
from observability.metrics import predictor as p

PREDICTOR = Section(
    "Predictor",
    (
        plot(
            "Time to forecast",
            "One batch.",
            SECONDS,
            *(Line(f"p{q}", Q.quantile(q / 100, p.FORECAST)) for q in (50, 99)),
            limits=up_to(0.01, 0.05),
        ),
        plot(
            "Time to the improved forecast",
            "From a request to its improved forecast.",
            SECONDS,
            *(Line(f"p{q}", Q.quantile(q / 100, p.READING_LAG)) for q in (50, 99)),
            limits=up_to(0.5, 2),
        ),
        plot(
            "Prompts to read",
            "Queued, of live and of ended requests.",
            COUNT,
            Line("live", Q.gauge(p.UNREAD)),
            Line("ended", Q.gauge(p.UNREAD_ENDED)),
            limits=up_to(100, 1_000),
        ),
        plot(
            "Prompts read",
            "Of live and of ended requests.",
            EVENTS_S,
            Line("{{of}}", Q.rate(p.READ, "of")),
            stacked=True,
        ),
        plot(
            "Share of a core",
            "Spent on reading and learning.",
            SHARE,
            Line("core", Q.gauge(p.CPU_SHARE, how="max")),
            limits=up_to(0.5, 0.9),
        ),
        plot(
            "Dropped",
            "Prompts dropped from queues, improved forecasts dropped for slow listeners, and "
            "requests dropped before their outcome.",
            EVENTS_S,
            Line("prompts", Q.rate(p.UNREAD_DROPPED)),
            Line("better forecasts", Q.rate(p.IMPROVED_DROPPED)),
            Line("features", Q.rate(p.PENDING_DROPPED)),
            limits=SELDOM,
        ),
        plot(
            "Outcomes seen",
            "Finished requests, by whether they were learned from.",
            EVENTS_S,
            Line("learnt: {{learnt}}", Q.rate(p.OUTCOMES, "learnt")),
            stacked=True,
        ),
        plot(
            "Fits by result",
            "Finished fits.",
            EVENTS_S,
            Line("{{result}}", Q.rate(p.REFITS, "result")),
        ),
        plot(
            "Time of a fit",
            "Its mean.",
            SECONDS,
            Line("fit", Q.mean(p.REFIT)),
            limits=up_to(60, 300),
        ),
        plot(
            "Age of the model",
            "Since the last fit was adopted; empty before the first.",
            SECONDS,
            Line("age", Q.gauge(p.MODEL_AGE, how="max")),
            limits=up_to(86_400, 604_800),
        ),
        plot(
            "Learned outcomes",
            "Outcomes learned with prompts, adopted fits, and requests without an outcome yet.",
            COUNT,
            Line("examples", Q.gauge(p.EXAMPLES, how="max")),
            Line("fits adopted", Q.gauge(p.MODEL_VERSION, how="max")),
            Line("awaited", Q.gauge(p.PENDING)),
        ),
        plot(
            "Listeners",
            "Streams that receive improved forecasts: one per scheduler.",
            COUNT,
            Line("listeners", Q.gauge(p.LISTENERS)),
            limits=at_least(1, 0.5),
        ),
    ),
)


OUTCOME_LOG = Section(
    "The outcome log",
    (
        plot(
            "Written and read",
            "Outcomes.",
            EVENTS_S,
            Line("written", Q.rate(p.LOG_WRITTEN)),
            Line("read", Q.rate(p.LOG_DELIVERED)),
        ),
        plot(
            "Pending",
            "Outcomes waiting to be written.",
            COUNT,
            Line("to be written", Q.gauge(p.LOG_PENDING)),
            limits=up_to(256, 4_096),
        ),
        plot(
            "Lost",
            "Outcomes dropped instead of written, unusable rows, and rows of a newer version.",
            EVENTS_S,
            Line("never written", Q.rate(p.LOG_DROPPED)),
            Line("unreadable", Q.rate(p.LOG_UNREADABLE)),
            Line("from a newer one", Q.rate(p.LOG_FROM_FUTURE)),
            limits=SELDOM,
        ),
        plot(
            "Unavailable",
            "1 while the log is unavailable.",
            COUNT,
            Line("unavailable", Q.gauge(p.LOG_UNAVAILABLE, how="max")),
            limits=NEVER,
            top=1,
        ),
    ),
)
