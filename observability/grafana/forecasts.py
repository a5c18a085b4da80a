"""Forecasts: how good they are, who makes them, what stands in, and the cost model beside them."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from observability.grafana.board import Section, board
from observability.grafana.inside_predictor import outcome_log, predictor
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


def _now() -> Section:
    return Section(
        "At a glance",
        (
            now(
                "Tau",
                "Kendall's tau-b of forecast means and lengths: 1 orders all requests rightly, 0 "
                "none.",
                COUNT,
                Line("tau", Q.gauge(p.TAU, how="min")),
                at_least(0.5, 0.2),
            ),
            now(
                "Coverage of 90 %",
                "Share of the last outcomes inside the interval that should have 90 %.",
                SHARE,
                Line("coverage", Q.gauge(p.COVERAGE, how="min", where={"interval": "90"})),
                at_least(0.86, COVERAGE_90),
            ),
            now(
                "Drift",
                "How differently the last 250 outcomes lay in their forecasts (Kolmogorov-Smirnov "
                "distance).",
                COUNT,
                Line("drift", Q.gauge(p.DRIFT, how="max")),
                up_to(0.12, FORECAST_DRIFT),
            ),
            now(
                "Outcomes behind it",
                "Outcomes that tau, coverage and drift are taken over.",
                COUNT,
                Line("outcomes", Q.gauge(p.SCORED, how="min")),
                at_least(500, 50),
            ),
            now(
                "Set aside",
                "1 while the model does worse than history, and history's forecasts are given.",
                COUNT,
                Line("set aside", Q.gauge(p.SET_ASIDE, how="max")),
                up_to(0.5, 2),
            ),
            now(
                "Cost model's error",
                "Half of the steps differ by less from what was told of them before, at the worker "
                "that is foretold worst.",
                SHARE,
                Line("median", Q.gauge(e.ERROR, how="max", where={"quantile": "0.5"})),
                COSTS_OFF,
            ),
        ),
    )


def _quality() -> Section:
    return Section(
        "How good they are",
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
                "Share of the last outcomes inside the central intervals of 50 and 90 %: as their "
                "names say where forecasts are honest.",
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
                "Kolmogorov-Smirnov distance of where the last 250 outcomes lay in their forecasts "
                "from where those before lay.",
                COUNT,
                Line("drift", Q.gauge(p.DRIFT, how="max")),
                limits=up_to(0.12, FORECAST_DRIFT),
            ),
            plot(
                "Error by source",
                "Distance of a forecast's mean from the length that came, over that length: the "
                "half with least, and nine tenths.",
                SHARE,
                Line("half, {{source}}", Q.quantile(0.5, p.ERROR, "source")),
                Line("nine tenths, {{source}}", Q.quantile(0.9, p.ERROR, "source")),
                limits=ERRORS,
            ),
            plot(
                "Mean error by source",
                "The same, its mean.",
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


def _clients() -> Section:
    covered = share(
        Q.rate(g.FORECAST_TOLD, where={"covered": "yes"}),
        Q.rate(g.FORECAST_TOLD),
    )
    kept = share(Q.rate(g.PROMISED_TTFT, where={"kept": "yes"}), Q.rate(g.PROMISED_TTFT))
    return Section(
        "What clients were told",
        (
            plot(
                "Lengths within the interval told",
                "Share of the requests that asked, whose length came to lie within the 90 % "
                "interval told at the start.",
                SHARE,
                Line("within", covered),
                limits=at_least(0.86, COVERAGE_90),
                top=1,
            ),
            plot(
                "First tokens by when they were promised",
                "Share of the requests that asked, whose first token came by then.",
                SHARE,
                Line("kept", kept),
                limits=at_least(0.5, 0.4),
                top=1,
            ),
            plot(
                "SLA verdicts foreseen, and what came",
                "Requests that asked, by what was foreseen and what came.",
                REQUESTS_S,
                Line(
                    "foreseen {{foreseen}}, {{outcome}}",
                    Q.rate(g.SLA_FORESEEN, "foreseen", "outcome"),
                ),
                stacked=True,
            ),
        ),
    )


def _sources() -> Section:
    return Section(
        "Who makes them, and what stands in",
        (
            plot(
                "Forecasts by source",
                "Made by the predictor.",
                EVENTS_S,
                Line("{{source}}", Q.rate(p.FORECASTS, "source")),
                stacked=True,
            ),
            plot(
                "Answered by what was known",
                "The prompt as read before, its words, or nothing of it.",
                EVENTS_S,
                Line("{{stage}}", Q.rate(p.ANSWERED, "stage")),
                stacked=True,
            ),
            plot(
                "The scheduler's own history stood in",
                "The predictor's forecast came late, its call failed, or it is not asked for a "
                "while (open).",
                EVENTS_S,
                Line("{{reason}}", Q.rate(s.FALLBACKS, "reason")),
                limits=SELDOM,
                stacked=True,
            ),
            plot(
                "The predictor's model stood aside",
                "Prompts that a model was to read or foretell and did not, by the reason.",
                EVENTS_S,
                Line("{{reason}}", Q.rate(p.FALLBACKS, "reason")),
                limits=SELDOM,
                stacked=True,
            ),
            plot(
                "Replaced by better ones",
                "Forecasts that a late answer replaced, or one improved by reading the prompt; and "
                "those the predictor told.",
                EVENTS_S,
                Line("{{by}}", Q.rate(s.REPLACED, "by")),
                Line("told", Q.rate(p.IMPROVED)),
            ),
            plot(
                "Is the predictor asked?",
                "The scheduler's breaker: closed (asked), half open (tried), open (not asked).",
                COUNT,
                Line("{{phase}}", Q.gauge(s.BREAKER, "phase", how="max")),
                top=1,
            ),
        ),
    )


def _costs() -> Section:
    return Section(
        "The cost model",
        (
            plot(
                "Error of a step's time",
                "Each told before it was learnt from: the half with least, and nine tenths. The "
                "worker that is foretold worst.",
                SHARE,
                Line("{{quantile}}", Q.gauge(e.ERROR, "quantile", how="max")),
                limits=COSTS_OFF,
            ),
            plot(
                "Error of a whole batch's time",
                "Told by its neighbours before it was learnt from. The worker that is foretold "
                "worst.",
                SHARE,
                Line("{{quantile}}", Q.gauge(e.BATCH_ERROR, "quantile", how="max")),
                limits=COSTS_OFF,
            ),
            plot(
                "Steps behind the error",
                "Of the worker with fewest. 0: too few came yet, and its error is of the fit "
                "itself.",
                COUNT,
                Line("steps", Q.gauge(e.ERROR_STEPS, how="min")),
                limits=at_least(100, 1),
            ),
            plot(
                "Timings",
                "Of steps, swaps and whole batches that came, by whether they could be used.",
                EVENTS_S,
                Line("steps, {{used}}", Q.rate(e.SAMPLES, "used")),
                Line("swaps, {{used}}", Q.rate(e.SWAPS, "used")),
                Line("batches, {{used}}", Q.rate(e.BATCHES, "used")),
            ),
            plot(
                "Fits",
                "Cost models fitted, and who watches for new ones.",
                COUNT,
                Line("fits a second", Q.rate(e.REFITS)),
                Line("watchers", Q.gauge(e.WATCHERS)),
            ),
            plot(
                "Time to take in timings",
                "A fit included.",
                SECONDS,
                *(Line(f"p{q}", Q.quantile(q / 100, e.OBSERVE)) for q in (50, 99)),
                limits=up_to(0.02, 0.2),
            ),
        ),
    )


def dashboard() -> Dashboard:
    """Tau, coverage, drift, fallback, error by source, what clients were told, and costs."""
    return board(
        "Forecasts",
        "How good forecasts are, who makes them, what stands in, and the cost model beside them.",
        _now(),
        _quality(),
        _clients(),
        _sources(),
        predictor(),
        outcome_log(),
        _costs(),
    )
