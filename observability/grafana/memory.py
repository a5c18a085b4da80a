"""Memory: KV on the device and in host memory, its forecast, and its moves."""

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
# Tokens in a worker's held blocks.
HELD_TOKENS = (
    f"{Q.gauge(w.BLOCKS, 'worker', where={'state': 'held'})} "
    f"* on (worker) {Q.gauge(w.BLOCK_TOKENS, 'worker', how='max')}"
)
HITS = share(Q.rate(w.PREFIX_HITS), Q.rate(w.PREFIX_QUERIES))


GLANCE = Section(
    "At a glance",
    (
        now(
            "Fullest device",
            "Share of KV blocks held by requests, at the fullest worker.",
            SHARE,
            Line("device", Q.gauge(w.USAGE, how="max")),
            USED,
        ),
        now(
            "Fullest host memory",
            "Share of host blocks in use, at the fullest worker.",
            SHARE,
            Line("host", Q.gauge(w.HOST_USAGE, how="max")),
            USED,
        ),
        now(
            "Resting",
            "Requests with KV in host memory.",
            COUNT,
            Line("resting", Q.gauge(w.RESTING)),
        ),
        now(
            "Evictions per admission",
            "Requests evicted per admission, at the worst worker, over 5 minutes.",
            COUNT,
            Line("evictions", Q.recorded(EVICTED)),
            up_to(0.01, EVICTIONS_PER_ADMISSION),
        ),
        now(
            "Time spent swapping",
            "Share of time, at the worst worker, over 5 minutes.",
            SHARE,
            Line("swapping", Q.recorded(SWAPPING)),
            up_to(0.1, SWAPPING_SHARE),
        ),
        now(
            "Prefix cache hits",
            "Share of prefill tokens found in the prefix cache.",
            SHARE,
            Line("found", HITS),
            at_least(0.1, 0),
        ),
    ),
)


BLOCKS = Section(
    "Blocks",
    (
        plot(
            "Blocks on the device",
            "Held by requests, kept for prefix sharing (cached), or free.",
            COUNT,
            Line("{{state}}", Q.gauge(w.BLOCKS, "state", where=ON_DEVICE)),
            stacked=True,
        ),
        plot(
            "Blocks in host memory",
            "Used or free.",
            COUNT,
            Line("{{state}}", Q.gauge(w.BLOCKS, "state", where=IN_HOST)),
            stacked=True,
        ),
        plot(
            "Held by worker",
            "Share of KV blocks held by requests, on the device and in host memory.",
            SHARE,
            Line("{{worker}}", Q.gauge(w.USAGE, "worker", how="max")),
            Line("{{worker}}, host", Q.gauge(w.HOST_USAGE, "worker", how="max")),
            limits=USED,
            top=1,
        ),
        plot(
            "Forecast peak and held tokens",
            "Forecast peak of each worker's KV tokens, and the held ones: above the forecast, "
            "forecasts are too low.",
            TOKENS,
            Line("{{worker}}, predicted peak", Q.gauge(s.PEAK, "worker", how="max")),
            Line("{{worker}}, held", HELD_TOKENS),
            width=12,
        ),
        plot(
            "Held share of the forecast peak",
            "Above 1, more is held than the forecast peak.",
            SHARE,
            Line("{{worker}}", ratio(HELD_TOKENS, Q.gauge(s.PEAK, "worker", how="max"))),
            limits=up_to(1, 1.1),
            width=12,
        ),
    ),
)


def _taken(direction: str) -> str:
    tokens = {"offload": w.OFFLOADED_TOKENS, "upload": w.UPLOADED_TOKENS}[direction]
    return ratio(Q.summed(w.SWAP, where={"direction": direction}), Q.rate(tokens))


SWAP = Section(
    "Swap",
    (
        plot(
            "Bytes copied",
            "KV between device and host, by direction.",
            BYTES_S,
            Line("{{direction}}", Q.rate(w.SWAP_BYTES, "direction")),
        ),
        plot(
            "Time of a copy",
            "Of one request's KV, by direction.",
            SECONDS,
            Line("half, {{direction}}", Q.quantile(0.5, w.SWAP, "direction")),
            Line("99 %, {{direction}}", Q.quantile(0.99, w.SWAP, "direction")),
            limits=up_to(0.05, 0.5),
        ),
        plot(
            "Time spent copying",
            "Share of time by worker, over 5 minutes.",
            SHARE,
            Line("{{worker}}", Q.recorded(SWAPPING, "worker")),
            limits=up_to(0.1, SWAPPING_SHARE),
        ),
        plot(
            "Requests moved",
            "Requests whose KV moved to host memory, and back.",
            REQUESTS_S,
            Line("offloaded", Q.rate(w.OFFLOADS)),
            Line("uploaded", Q.rate(w.UPLOADS)),
        ),
        plot(
            "Tokens moved",
            "KV tokens moved to host memory, and back.",
            TOKENS_S,
            Line("offloaded", Q.rate(w.OFFLOADED_TOKENS)),
            Line("uploaded", Q.rate(w.UPLOADED_TOKENS)),
        ),
        plot(
            "Transfer time per token, estimated and actual",
            "Seconds per KV token: by the cost model, the device's part (gather, "
            "quantizing), and as measured.",
            SECONDS,
            Line("{{direction}}, estimated", Q.gauge(e.SWAP_TOKEN, "direction", how="max")),
            Line("device's own, estimated", Q.gauge(e.QUANTIZE_TOKEN, how="max")),
            Line("offload, taken", _taken("offload")),
            Line("upload, taken", _taken("upload")),
        ),
    ),
)


PRESSURE = Section(
    "Evictions and prefixes",
    (
        plot(
            "Evictions by KV",
            "Requests evicted for lack of memory: KV offloaded, or dropped and recomputed.",
            REQUESTS_S,
            Line("{{kv}}", Q.rate(w.EVICTIONS, "kv")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "KV dropped",
            "Requests whose KV was dropped, in total and because host memory was full.",
            REQUESTS_S,
            Line("dropped", Q.rate(w.DROPPED)),
            Line("host memory full", Q.rate(w.HOST_FULL)),
            limits=SELDOM,
        ),
        plot(
            "Prefix cache hits",
            "Share of prefill tokens found in the prefix cache, by worker.",
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
    """Device and host blocks, forecast peak against actual, and swap."""
    return board(
        "Memory",
        "KV on the device and in host memory, its forecast, and its moves.",
        GLANCE,
        BLOCKS,
        SWAP,
        PRESSURE,
    )
