"""Forecasts: accuracy, source, fallbacks, and the cost model."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from observability.grafana.board import Section, board
from observability.grafana.inside_predictor import OUTCOME_LOG, PREDICTOR
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
    now,
    plot,
    up_to,
)
from observability.metrics import estimator as e
from observability.metrics import gateway as g
from observability.metrics import predictor as p
from observability.metrics import scheduler as s
from observability.prometheus.limits import COST_ERROR, COVERAGE_90, FORECAST_DRIFT
from observability.prometheus.promql import share

ERRORS = up_to(0.5, 1)
COSTS_OFF = up_to(0.1, COST_ERROR)
INTERVALS = ("50", "90")


GLANCE = Section(
    "At a glance",
    (
        now(
            "Tau",
            "Kendall's tau-b of forecast means and lengths: 1 is a perfect order, 0 a random one.",
            COUNT,
            Line("tau", Q.gauge(p.TAU, how="min")),
            at_least(0.5, 0.2),
        ),
        now(
            "Coverage of 90 %",
            "Share of the last outcomes inside the 90 % interval.",
            SHARE,
            Line("coverage", Q.gauge(p.COVERAGE, how="min", where={"interval": "90"})),
            at_least(0.86, COVERAGE_90),
        ),
        now(
            "Drift",
            "Kolmogorov-Smirnov distance between the forecast levels of the last 250 outcomes "
            "and of those before.",
            COUNT,
            Line("drift", Q.gauge(p.DRIFT, how="max")),
            up_to(0.12, FORECAST_DRIFT),
        ),
        now(
            "Outcomes",
            "Outcomes in tau, coverage and drift.",
            COUNT,
            Line("outcomes", Q.gauge(p.SCORED, how="min")),
            at_least(500, 50),
        ),
        now(
            "Set aside",
            "1 while the model is worse than history, so that history's forecasts are used.",
            COUNT,
            Line("set aside", Q.gauge(p.SET_ASIDE, how="max")),
            up_to(0.5, 2),
        ),
        now(
            "Cost model's error",
            "Median relative error of step estimates, at the worker with the largest.",
            SHARE,
            Line("median", Q.gauge(e.ERROR, how="max", where={"quantile": "0.5"})),
            COSTS_OFF,
        ),
    ),
)


QUALITY = Section(
    "Accuracy",
    (
        plot(
            "Tau",
            "Kendall's tau-b of forecast means and lengths.",
            COUNT,
            Line("tau", Q.gauge(p.TAU, how="min")),
            limits=at_least(0.5, 0.2),
            top=1,
        ),
        plot(
            "Coverage",
            "Share of the last outcomes inside the central 50 % and 90 % intervals: equal to "
            "these if forecasts are calibrated.",
            SHARE,
            *(
                Line(
                    f"should be {interval} %",
                    Q.gauge(p.COVERAGE, how="min", where={"interval": interval}),
                )
                for interval in INTERVALS
            ),
            limits=at_least(COVERAGE_90, 0.4),
            top=1,
        ),
        plot(
            "Drift",
            "Kolmogorov-Smirnov distance between the forecast levels of the last 250 outcomes "
            "and of those before.",
            COUNT,
            Line("drift", Q.gauge(p.DRIFT, how="max")),
            limits=up_to(0.12, FORECAST_DRIFT),
        ),
        plot(
            "Error by source",
            "Distance of a forecast's mean from the true length, relative to it: median and "
            "90th percentile.",
            SHARE,
            Line("half, {{source}}", Q.quantile(0.5, p.ERROR, "source")),
            Line("nine tenths, {{source}}", Q.quantile(0.9, p.ERROR, "source")),
            limits=ERRORS,
        ),
        plot(
            "Mean error by source",
            "Mean of the same.",
            SHARE,
            Line("{{source}}", Q.mean(p.ERROR, "source")),
            limits=ERRORS,
        ),
        plot(
            "Quantile loss",
            "Mean pinball loss of the last outcomes.",
            TOKENS,
            Line("loss", Q.gauge(p.PINBALL, how="max")),
        ),
    ),
)


_CLIENTS_COVERED = share(
    Q.rate(g.CLIENT_FORECASTS, where={"covered": "yes"}),
    Q.rate(g.CLIENT_FORECASTS),
)
_CLIENTS_KEPT = share(Q.rate(g.TTFT_PROMISES, where={"kept": "yes"}), Q.rate(g.TTFT_PROMISES))
CLIENTS = Section(
    "Forecasts sent to clients",
    (
        plot(
            "Lengths within the sent interval",
            "Share of requests with forecasts whose length was within the first 90 % interval.",
            SHARE,
            Line("within", _CLIENTS_COVERED),
            limits=at_least(0.86, COVERAGE_90),
            top=1,
        ),
        plot(
            "Promised first tokens",
            "Share of promised first tokens that were sent in time.",
            SHARE,
            Line("kept", _CLIENTS_KEPT),
            limits=at_least(0.5, 0.4),
            top=1,
        ),
        plot(
            "SLA forecasts and outcomes",
            "Requests with forecasts, by forecast and outcome.",
            REQUESTS_S,
            Line(
                "foreseen {{foreseen}}, {{outcome}}",
                Q.rate(g.SLA_FORECASTS, "foreseen", "outcome"),
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
            "Made by the predictor.",
            EVENTS_S,
            Line("{{source}}", Q.rate(p.FORECASTS, "source")),
            stacked=True,
        ),
        plot(
            "Immediate forecasts by input",
            "A cached reading of the prompt, its words, or nothing of it.",
            EVENTS_S,
            Line("{{stage}}", Q.rate(p.ANSWERED, "stage")),
            stacked=True,
        ),
        plot(
            "Fallbacks to the scheduler's history",
            "The predictor's forecast was late, its call failed, or the circuit breaker is open.",
            EVENTS_S,
            Line("{{reason}}", Q.rate(s.FALLBACKS, "reason")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Prompts without the model",
            "Prompts that the model could not read or forecast, by reason.",
            EVENTS_S,
            Line("{{reason}}", Q.rate(p.FALLBACKS, "reason")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Replaced forecasts",
            "Forecasts replaced by a late answer or by an improved one; and improved forecasts "
            "sent by the predictor.",
            EVENTS_S,
            Line("{{by}}", Q.rate(s.REPLACED, "by")),
            Line("told", Q.rate(p.IMPROVED)),
        ),
        plot(
            "Circuit breaker",
            "State of the predictor's circuit breaker: closed, half open or open.",
            COUNT,
            Line("{{phase}}", Q.gauge(s.BREAKER, "phase", how="max")),
            top=1,
        ),
    ),
)


COSTS = Section(
    "The cost model",
    (
        plot(
            "Error of a step's time",
            "Before learning from the step: median and 90th percentile, at the worker with the "
            "largest error.",
            SHARE,
            Line("{{quantile}}", Q.gauge(e.ERROR, "quantile", how="max")),
            limits=COSTS_OFF,
        ),
        plot(
            "Error of a whole batch's time",
            "By nearest neighbours, before learning from the batch, at the worker with the "
            "largest error.",
            SHARE,
            Line("{{quantile}}", Q.gauge(e.BATCH_ERROR, "quantile", how="max")),
            limits=COSTS_OFF,
        ),
        plot(
            "Steps behind the error",
            "At the worker with the fewest. 0: too few yet, and the error is that of the fit.",
            COUNT,
            Line("steps", Q.gauge(e.ERROR_STEPS, how="min")),
            limits=at_least(100, 1),
        ),
        plot(
            "Timings",
            "Received timings of steps, swaps and batches, by whether they were usable.",
            EVENTS_S,
            Line("steps, {{used}}", Q.rate(e.SAMPLES, "used")),
            Line("swaps, {{used}}", Q.rate(e.SWAPS, "used")),
            Line("batches, {{used}}", Q.rate(e.BATCHES, "used")),
        ),
        plot(
            "Fits",
            "Fitted cost models, and their watchers.",
            COUNT,
            Line("fits a second", Q.rate(e.REFITS)),
            Line("watchers", Q.gauge(e.WATCHERS)),
        ),
        plot(
            "Time to process timings",
            "Including a fit.",
            SECONDS,
            *(Line(f"p{q}", Q.quantile(q / 100, e.OBSERVE)) for q in (50, 99)),
            limits=up_to(0.02, 0.2),
        ),
    ),
)


def dashboard() -> Dashboard:
    """Tau, coverage, drift, fallbacks, error by source, forecasts sent to clients, and costs."""
    return board(
        "Forecasts",
        "Accuracy and sources of forecasts, fallbacks, and the cost model.",
        GLANCE,
        QUALITY,
        CLIENTS,
        SOURCES,
        PREDICTOR,
        OUTCOME_LOG,
        COSTS,
    )
