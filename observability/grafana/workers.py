"""Workers: their steps, what they compute, and what of it was for nothing."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from observability.grafana.board import Section, board
from observability.grafana.parts import (
    COUNT,
    SECONDS,
    SELDOM,
    SHARE,
    TOKENS,
    TOKENS_S,
    Line,
    Q,
    at_least,
    heat,
    now,
    plot,
    up_to,
)
from observability.metrics import scheduler as s
from observability.metrics import worker as w
from observability.prometheus.promql import share

STEP = up_to(0.05, 0.2)
WASTED = up_to(0.05, 0.3)
BUSY_ALL = f"sum({Q.rate(w.BUSY, 'worker')}) / count({Q.rate(w.BUSY, 'worker')})"


def _now() -> Section:
    return Section(
        "At a glance",
        (
            now(
                "Workers",
                "Attached to the scheduler.",
                COUNT,
                Line("workers", Q.gauge(s.WORKERS)),
                at_least(1, 0.5),
            ),
            now(
                "Running",
                "Requests admitted to workers and not finished.",
                COUNT,
                Line("running", Q.gauge(w.RUNNING)),
            ),
            now("Tokens drawn", "By all workers.", TOKENS_S, Line("drawn", Q.rate(w.DECODED))),
            now(
                "Busy",
                "Share of the time that workers are in a step, their mean.",
                SHARE,
                Line("busy", BUSY_ALL),
            ),
            now(
                "Step, p99",
                "99 % of steps are shorter.",
                SECONDS,
                Line("step", Q.quantile(0.99, w.STEP)),
                STEP,
            ),
            now(
                "Tokens a step",
                "Mean tokens that a step computes.",
                TOKENS,
                Line("tokens", Q.mean(w.BATCH_TOKENS)),
            ),
        ),
    )


def _steps() -> Section:
    phases = Q.rate(w.PHASES, "worker", "phase")
    whole = f"on (worker) group_left () ({Q.rate(w.PHASES, 'worker')} > 0)"
    return Section(
        "Steps",
        (
            plot(
                "Time of a step",
                "By worker: the half with least, and 99 %.",
                SECONDS,
                Line("half, {{worker}}", Q.quantile(0.5, w.STEP, "worker")),
                Line("99 %, {{worker}}", Q.quantile(0.99, w.STEP, "worker")),
                limits=STEP,
            ),
            heat("Times of steps", "How they are spread.", SECONDS, Q.buckets(w.STEP), STEP),
            heat(
                "Tokens of steps",
                "How many tokens steps compute.",
                TOKENS,
                Q.buckets(w.BATCH_TOKENS),
            ),
            plot(
                "Idle",
                "Share of the time that a worker is in no step.",
                SHARE,
                Line("{{worker}}", f"1 - {Q.rate(w.BUSY, 'worker')}"),
                top=1,
            ),
            plot(
                "What the engine's time goes to",
                "Share of its thread's time in steps, by phase.",
                SHARE,
                Line("{{worker}}: {{phase}}", f"{phases} / {whole}"),
                stacked=True,
                top=1,
            ),
            plot(
                "Tokens of a step by worker",
                "Their mean.",
                TOKENS,
                Line("{{worker}}", Q.mean(w.BATCH_TOKENS, "worker")),
            ),
        ),
    )


def _tokens() -> Section:
    computed = f"({Q.rate(w.DECODED)} + {Q.rate(w.PREFILLED)})"
    return Section(
        "Tokens",
        (
            plot(
                "Drawn by worker",
                "Output tokens.",
                TOKENS_S,
                Line("{{worker}}", Q.rate(w.DECODED, "worker")),
                stacked=True,
            ),
            plot(
                "Prefilled by worker",
                "Prompt tokens, recomputed ones too.",
                TOKENS_S,
                Line("{{worker}}", Q.rate(w.PREFILLED, "worker")),
                stacked=True,
            ),
            plot(
                "Computed for nothing",
                "Padding of static batches, tokens drawn after a request's end while its batch "
                "went on, and rows computed a step ahead for who had gone.",
                TOKENS_S,
                Line("padding", Q.rate(w.PADDING)),
                Line("after the end", Q.rate(w.INVALID)),
                Line("a step ahead", Q.rate(w.STRAY)),
                limits=SELDOM,
                stacked=True,
            ),
            plot(
                "Share computed for nothing",
                "Padding and tokens after the end, of all tokens computed.",
                SHARE,
                Line("padding", share(Q.rate(w.PADDING), computed)),
                Line("after the end", share(Q.rate(w.INVALID), computed)),
                limits=WASTED,
                width=12,
            ),
            plot(
                "Padding left out",
                "Padding of static batches that memory had no room for, or that broke a step.",
                TOKENS_S,
                Line("left out", Q.rate(w.PADDING_LEFT_OUT)),
                limits=SELDOM,
                width=12,
            ),
        ),
    )


def _each() -> Section:
    return Section(
        "Each worker",
        (
            plot(
                "Requests",
                "Running, and resting in host memory.",
                COUNT,
                Line("{{worker}}", Q.gauge(w.RUNNING, "worker")),
                Line("{{worker}}, resting", Q.gauge(w.RESTING, "worker")),
            ),
            plot(
                "Memory held",
                "Share of the device's KV blocks that somebody holds.",
                SHARE,
                Line("{{worker}}", Q.gauge(w.USAGE, "worker", how="max")),
                limits=up_to(0.9, 0.98),
                top=1,
            ),
            plot(
                "Lost",
                "How often a worker's stream to the scheduler ended in the last 15 minutes.",
                COUNT,
                Line("lost", Q.increase(s.WORKERS_LOST, window="15m")),
                limits=SELDOM,
            ),
        ),
    )


def dashboard() -> Dashboard:
    """Steps, what the time goes to, tokens, and each worker."""
    return board(
        "Workers",
        "What workers compute, how long steps take, and what of it was for nothing.",
        _now(),
        _steps(),
        _tokens(),
        _each(),
    )
