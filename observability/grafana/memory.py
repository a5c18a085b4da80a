"""Memory: KV on the device and in host memory, what was foreseen of it, and what moves."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from observability.grafana.board import Section, board
from observability.grafana.parts import (
    BYTES_S,
    COUNT,
    REQUESTS_S,
    SECONDS,
    SELDOM,
    SHARE,
    TOKENS,
    TOKENS_S,
    Line,
    Q,
    at_least,
    now,
    plot,
    up_to,
)
from observability.metrics import estimator as e
from observability.metrics import scheduler as s
from observability.metrics import worker as w
from observability.prometheus.limits import EVICTIONS_PER_ADMISSION, SWAPPING_SHARE
from observability.prometheus.promql import OneOf, ratio, share
from observability.prometheus.records import EVICTED, SWAPPING

USED = up_to(0.9, 0.98)
ON_DEVICE = {"state": OneOf(("held", "cached", "free"))}
IN_HOST = {"state": OneOf(("resting", "host_free"))}
# Tokens that a worker's held blocks take.
HELD_TOKENS = (
    f"{Q.gauge(w.BLOCKS, 'worker', where={'state': 'held'})} "
    f"* on (worker) {Q.gauge(w.BLOCK_TOKENS, 'worker', how='max')}"
)
HITS = share(Q.rate(w.PREFIX_HITS), Q.rate(w.PREFIX_QUERIES))


def _now() -> Section:
    return Section(
        "At a glance",
        (
            now(
                "Fullest device",
                "Share of the KV blocks that somebody holds, at the fullest worker.",
                SHARE,
                Line("device", Q.gauge(w.USAGE, how="max")),
                USED,
            ),
            now(
                "Fullest host memory",
                "The same of host memory.",
                SHARE,
                Line("host", Q.gauge(w.HOST_USAGE, how="max")),
                USED,
            ),
            now(
                "Resting",
                "Requests whose KV rests in host memory.",
                COUNT,
                Line("resting", Q.gauge(w.RESTING)),
            ),
            now(
                "Evictions an admission",
                "Requests stopped for want of memory for each that is admitted, at the worst "
                "worker, over 5 minutes.",
                COUNT,
                Line("evictions", Q.recorded(EVICTED)),
                up_to(0.01, EVICTIONS_PER_ADMISSION),
            ),
            now(
                "Time spent swapping",
                "Of each second, at the worst worker, over 5 minutes.",
                SHARE,
                Line("swapping", Q.recorded(SWAPPING)),
                up_to(0.1, SWAPPING_SHARE),
            ),
            now(
                "Prefixes found",
                "Share of the tokens of prefills whose KV was there already.",
                SHARE,
                Line("found", HITS),
                at_least(0.1, 0),
            ),
        ),
    )


def _blocks() -> Section:
    return Section(
        "Blocks, as workers count them",
        (
            plot(
                "Blocks on the device",
                "Held by somebody, by nobody but found by their prefix (cached), or free.",
                COUNT,
                Line("{{state}}", Q.gauge(w.BLOCKS, "state", where=ON_DEVICE)),
                stacked=True,
            ),
            plot(
                "Blocks in host memory",
                "Used by who rests, or free.",
                COUNT,
                Line("{{state}}", Q.gauge(w.BLOCKS, "state", where=IN_HOST)),
                stacked=True,
            ),
            plot(
                "Held by worker",
                "Share of the device's KV blocks that somebody holds, and of host memory's.",
                SHARE,
                Line("{{worker}}", Q.gauge(w.USAGE, "worker", how="max")),
                Line("{{worker}}, host", Q.gauge(w.HOST_USAGE, "worker", how="max")),
                limits=USED,
                top=1,
            ),
            plot(
                "Predicted peak and what is held",
                "The most KV tokens that each worker is foreseen to hold, beside what it holds: "
                "held ones above their prediction mean that forecasts were too low.",
                TOKENS,
                Line("{{worker}}, predicted peak", Q.gauge(s.PEAK, "worker", how="max")),
                Line("{{worker}}, held", HELD_TOKENS),
                width=12,
            ),
            plot(
                "Held of the predicted peak",
                "Above 1, more is held than was foreseen at most.",
                SHARE,
                Line("{{worker}}", ratio(HELD_TOKENS, Q.gauge(s.PEAK, "worker", how="max"))),
                limits=up_to(1, 1.1),
                width=12,
            ),
        ),
    )


def _swap() -> Section:
    return Section(
        "Swap",
        (
            plot(
                "Bytes copied",
                "KV between device and host, each way.",
                BYTES_S,
                Line("{{direction}}", Q.rate(w.SWAP_BYTES, "direction")),
            ),
            plot(
                "Time of a copy",
                "Of one request's KV, each way.",
                SECONDS,
                Line("half, {{direction}}", Q.quantile(0.5, w.SWAP, "direction")),
                Line("99 %, {{direction}}", Q.quantile(0.99, w.SWAP, "direction")),
                limits=up_to(0.05, 0.5),
            ),
            plot(
                "Time spent copying",
                "Seconds of each second, by worker, over 5 minutes.",
                SHARE,
                Line("{{worker}}", Q.recorded(SWAPPING, "worker")),
                limits=up_to(0.1, SWAPPING_SHARE),
            ),
            plot(
                "Requests moved",
                "Requests whose KV went to host memory, and came back.",
                REQUESTS_S,
                Line("offloaded", Q.rate(w.OFFLOADS)),
                Line("uploaded", Q.rate(w.UPLOADS)),
            ),
            plot(
                "Tokens moved",
                "Tokens of KV that went to host memory, and came back.",
                TOKENS_S,
                Line("offloaded", Q.rate(w.OFFLOADED_TOKENS)),
                Line("uploaded", Q.rate(w.UPLOADED_TOKENS)),
            ),
            plot(
                "A token's way, foreseen and taken",
                "Seconds a token of KV takes each way: by the cost model, what the device itself "
                "spends of it (gathering, quantizing), and as copies took.",
                SECONDS,
                Line("{{direction}}, foreseen", Q.gauge(e.SWAP_TOKEN, "direction", how="max")),
                Line("device's own, foreseen", Q.gauge(e.QUANTIZE_TOKEN, how="max")),
                Line("offload, taken", _taken("offload")),
                Line("upload, taken", _taken("upload")),
            ),
        ),
    )


def _taken(direction: str) -> str:
    tokens = {"offload": w.OFFLOADED_TOKENS, "upload": w.UPLOADED_TOKENS}[direction]
    return ratio(Q.summed(w.SWAP, where={"direction": direction}), Q.rate(tokens))


def _pressure() -> Section:
    return Section(
        "Want of memory, and prefixes",
        (
            plot(
                "Evictions by what became of their KV",
                "Requests that workers stopped for want of memory: offloaded, or dropped and "
                "computed again.",
                REQUESTS_S,
                Line("{{kv}}", Q.rate(w.EVICTIONS, "kv")),
                limits=SELDOM,
                stacked=True,
            ),
            plot(
                "KV let go",
                "Requests whose KV was dropped, and those of them that host memory had no room "
                "for.",
                REQUESTS_S,
                Line("dropped", Q.rate(w.DROPPED)),
                Line("host memory full", Q.rate(w.HOST_FULL)),
                limits=SELDOM,
            ),
            plot(
                "Prefixes found",
                "Share of the tokens of prefills whose KV was there already, by worker.",
                SHARE,
                Line(
                    "{{worker}}",
                    share(Q.rate(w.PREFIX_HITS, "worker"), Q.rate(w.PREFIX_QUERIES, "worker")),
                ),
                limits=at_least(0.1, 0),
                top=1,
            ),
        ),
    )


def dashboard() -> Dashboard:
    """Device and host blocks, predicted peak against actual, and swap."""
    return board(
        "Memory",
        "KV on the device and in host memory, what was foreseen of it, and what moves.",
        _now(),
        _blocks(),
        _swap(),
        _pressure(),
    )
