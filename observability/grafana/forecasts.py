"""Dashboard Forecasts: accuracy, sources, fallbacks, and the cost model."""

from observability.grafana.board import Board, Section
from observability.grafana.parts import (
    COUNT,
    EVENTS_S,
    REQUESTS_S,
    SECONDS,
    SELDOM,
    SHARE,
    TOKENS,
    Line,
    Q,
    at_least,
    last_value,
    percentiles,
    plot,
    up_to,
)
from observability.grafana.predictor_sections import OUTCOME_LOG, PREDICTOR
from observability.metrics import estimator as e
from observability.metrics import gateway as g
from observability.metrics import predictor as p
from observability.metrics import scheduler as s
from observability.prometheus.limits import COST_ERROR, COVERAGE_90, FORECAST_DRIFT
from observability.prometheus.promql import share

ERROR, COST = up_to(0.5, 1), up_to(0.1, COST_ERROR)
TAU, DRIFT = at_least(0.5, 0.2), up_to(0.12, FORECAST_DRIFT)
COVERED = at_least(0.86, COVERAGE_90)


GLANCE = Section(
    "At a glance",
    (
        last_value("Tau", COUNT, Line("tau", Q.gauge(p.TAU, agg="min")), limits=TAU),
        last_value(
            "Coverage of 90 %",
            SHARE,
            Line("coverage", Q.gauge(p.COVERAGE, agg="min", where={"interval": "90"})),
            limits=COVERED,
        ),
        last_value("Drift", COUNT, Line("drift", Q.gauge(p.DRIFT, agg="max")), limits=DRIFT),
        last_value(
            "Outcomes",
            COUNT,
            Line("outcomes", Q.gauge(p.SCORED, agg="min")),
            limits=at_least(500, 50),
        ),
        last_value(
            "Prompt model set aside",
            COUNT,
            Line("set aside", Q.gauge(p.SET_ASIDE, agg="max")),
            limits=up_to(0.5, 2),
        ),
        last_value(
            "Error of the cost model",
            SHARE,
            Line("p50", Q.gauge(e.ERROR, agg="max", where={"quantile": "0.5"})),
            "Median relative error of estimated step times, at the worker with the largest error.",
            COST,
        ),
    ),
)


ACCURACY = Section(
    "Accuracy",
    (
        plot("Tau", COUNT, Line("tau", Q.gauge(p.TAU, agg="min")), limits=TAU, top=1),
        plot(
            "Coverage",
            SHARE,
            *(
                Line(
                    f"{interval} % interval",
                    Q.gauge(p.COVERAGE, agg="min", where={"interval": interval}),
                )
                for interval in ("50", "90")
            ),
            description=f"{p.COVERAGE.help} Calibrated forecasts cover 0.5 and 0.9.",
            limits=at_least(COVERAGE_90, 0.4),
            top=1,
        ),
        plot("Drift", COUNT, Line("drift", Q.gauge(p.DRIFT, agg="max")), limits=DRIFT),
        plot(
            "Error by source",
            SHARE,
            Line("p50, {{source}}", Q.quantile(0.5, p.ERROR, "source")),
            Line("p90, {{source}}", Q.quantile(0.9, p.ERROR, "source")),
            limits=ERROR,
        ),
        plot(
            "Mean error by source",
            SHARE,
            Line("{{source}}", Q.mean(p.ERROR, "source")),
            limits=ERROR,
        ),
        plot("Pinball loss", TOKENS, Line("loss", Q.gauge(p.PINBALL, agg="max"))),
    ),
)


CLIENTS = Section(
    "Forecasts sent to clients",
    (
        plot(
            "Lengths within the sent interval",
            SHARE,
            Line(
                "within",
                share(
                    Q.rate(g.CLIENT_FORECASTS, where={"covered": "yes"}),
                    Q.rate(g.CLIENT_FORECASTS),
                ),
            ),
            description="Share of requests with a final length within the first 90 % interval, "
            "among requests with a forecast sent to the client.",
            limits=COVERED,
            top=1,
        ),
        plot(
            "Kept TTFT promises",
            SHARE,
            Line(
                "kept",
                share(Q.rate(g.TTFT_PROMISES, where={"kept": "yes"}), Q.rate(g.TTFT_PROMISES)),
            ),
            description="Share of promised times to first token that were kept.",
            limits=at_least(0.5, 0.4),
            top=1,
        ),
        plot(
            "SLA forecasts and outcomes",
            REQUESTS_S,
            Line(
                "forecast {{foreseen}}, {{outcome}}", Q.rate(g.SLA_FORECASTS, "foreseen", "outcome")
            ),
            stacked=True,
        ),
    ),
)


SOURCES = Section(
    "Sources and fallbacks",
    (
        plot(
            "Forecasts by source",
            EVENTS_S,
            Line("{{source}}", Q.rate(p.FORECASTS, "source")),
            stacked=True,
        ),
        plot(
            "Immediate forecasts by input",
            EVENTS_S,
            Line("{{stage}}", Q.rate(p.ANSWERED, "stage")),
            stacked=True,
        ),
        plot(
            "Fallbacks to the scheduler's history",
            EVENTS_S,
            Line("{{reason}}", Q.rate(s.FALLBACKS, "reason")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Prompts without the model",
            EVENTS_S,
            Line("{{reason}}", Q.rate(p.FALLBACKS, "reason")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Replaced and improved forecasts",
            EVENTS_S,
            Line("replaced by {{by}}", Q.rate(s.REPLACED, "by")),
            Line("improved", Q.rate(p.IMPROVED)),
        ),
        plot(
            "Circuit breaker",
            COUNT,
            Line("{{phase}}", Q.gauge(s.BREAKER, "phase", agg="max")),
            top=1,
        ),
    ),
)


COSTS = Section(
    "Cost model",
    (
        plot(
            "Error of step times",
            SHARE,
            Line("{{quantile}}", Q.gauge(e.ERROR, "quantile", agg="max")),
            description=f"{e.ERROR.help} The worker with the largest error.",
            limits=COST,
        ),
        plot(
            "Error of batch times",
            SHARE,
            Line("{{quantile}}", Q.gauge(e.BATCH_ERROR, "quantile", agg="max")),
            description=f"{e.BATCH_ERROR.help} The worker with the largest error.",
            limits=COST,
        ),
        plot(
            "Steps behind the error",
            COUNT,
            Line("steps", Q.gauge(e.ERROR_STEPS, agg="min")),
            description=f"{e.ERROR_STEPS.help} The worker with the fewest steps.",
            limits=at_least(100, 1),
        ),
        plot(
            "Timings",
            EVENTS_S,
            Line("steps, used: {{used}}", Q.rate(e.SAMPLES, "used")),
            Line("swaps, used: {{used}}", Q.rate(e.SWAPS, "used")),
            Line("batches, used: {{used}}", Q.rate(e.BATCHES, "used")),
        ),
        plot(
            "Fits and watchers",
            COUNT,
            Line("fits per second", Q.rate(e.REFITS)),
            Line("watchers", Q.gauge(e.WATCHERS)),
        ),
        plot(
            "Time to process timings",
            SECONDS,
            *percentiles(50, 99, of=e.OBSERVE),
            limits=up_to(0.02, 0.2),
        ),
    ),
)


BOARD = Board(
    "Forecasts",
    "Accuracy and sources of forecasts, fallbacks, and the cost model.",
    (GLANCE, ACCURACY, CLIENTS, SOURCES, PREDICTOR, OUTCOME_LOG, COSTS),
)
