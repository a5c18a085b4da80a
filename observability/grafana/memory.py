"""Dashboard Memory: KV on the device and in host memory, its forecast peak, and its moves."""

from observability.grafana.board import Board, Section
from observability.grafana.parts import (
    BYTES_S,
    COUNT,
    EVENTS_S,
    REQUESTS_S,
    SECONDS,
    SELDOM,
    SHARE,
    TOKENS,
    TOKENS_S,
    Line,
    Q,
    at_least,
    last_value,
    plot,
    up_to,
)
from observability.metrics import estimator as e
from observability.metrics import scheduler as s
from observability.metrics import worker as w
from observability.metrics.metric import Metric
from observability.prometheus.limits import EVICTIONS_PER_ADMISSION, SWAPPING_SHARE
from observability.prometheus.promql import OneOf, ratio, share
from observability.prometheus.records import EVICTED, SWAPPING

USED = up_to(0.9, 0.98)
ON_DEVICE = {"state": OneOf(("held", "cached", "free"))}
IN_HOST = {"state": OneOf(("resting", "host_free"))}
HELD_TOKENS = (
    f"{Q.gauge(w.BLOCKS, 'worker', where={'state': 'held'})} "
    f"* on (worker) {Q.gauge(w.BLOCK_TOKENS, 'worker', agg='max')}"
)
WORKERS_BY_SIZE = Q.gauge(w.CACHE_CONFIG, "num_gpu_blocks", "block_size")
PEAK_TOKENS = Q.gauge(s.PEAK, "worker", agg="max")
HITS = share(Q.rate(w.PREFIX_HITS), Q.rate(w.PREFIX_QUERIES))
HITS_BY_WORKER = share(Q.rate(w.PREFIX_HITS, "worker"), Q.rate(w.PREFIX_QUERIES, "worker"))
HITS_HELP = "Share of prefill tokens found in the prefix cache."


def _token_s(direction: str, tokens: Metric) -> str:
    return ratio(Q.summed(w.SWAP, where={"direction": direction}), Q.rate(tokens))


GLANCE = Section(
    "At a glance",
    (
        last_value(
            "Fullest device",
            SHARE,
            Line("device", Q.gauge(w.USAGE, agg="max")),
            f"{w.USAGE.help} The fullest worker.",
            USED,
        ),
        last_value(
            "Fullest host memory",
            SHARE,
            Line("host", Q.gauge(w.HOST_USAGE, agg="max")),
            f"{w.HOST_USAGE.help} The fullest worker.",
            USED,
        ),
        last_value("KV in host memory", COUNT, Line("requests", Q.gauge(w.RESTING))),
        last_value(
            "Evictions per admission",
            COUNT,
            Line("evictions", Q.recorded(EVICTED)),
            "Evicted requests per admitted request over 5 minutes, at the worst worker.",
            up_to(0.01, EVICTIONS_PER_ADMISSION),
        ),
        last_value(
            "Time spent swapping",
            SHARE,
            Line("swapping", Q.recorded(SWAPPING)),
            "Share of time spent copying KV over 5 minutes, at the worst worker.",
            up_to(0.1, SWAPPING_SHARE),
        ),
        last_value("Prefix cache hits", SHARE, Line("found", HITS), HITS_HELP, at_least(0.1, 0)),
    ),
)


BLOCKS = Section(
    "Blocks",
    (
        plot(
            "Blocks on the device",
            COUNT,
            Line("{{state}}", Q.gauge(w.BLOCKS, "state", where=ON_DEVICE)),
            stacked=True,
        ),
        plot(
            "Blocks in host memory",
            COUNT,
            Line("{{state}}", Q.gauge(w.BLOCKS, "state", where=IN_HOST)),
            stacked=True,
        ),
        plot(
            "Held blocks by worker",
            SHARE,
            Line("{{worker}}", Q.gauge(w.USAGE, "worker", agg="max")),
            Line("{{worker}}, host", Q.gauge(w.HOST_USAGE, "worker", agg="max")),
            limits=USED,
            top=1,
        ),
        plot(
            "Forecast peak and held tokens",
            TOKENS,
            Line("{{worker}}, forecast peak", PEAK_TOKENS),
            Line("{{worker}}, held", HELD_TOKENS),
            description="Forecast peak of each worker's KV tokens, and the tokens held. Forecasts "
            "are too low where more is held than forecast.",
            width=12,
        ),
        plot(
            "Held share of the forecast peak",
            SHARE,
            Line("{{worker}}", ratio(HELD_TOKENS, PEAK_TOKENS)),
            description="Held tokens as a share of the forecast peak. Above 1, forecasts are too "
            "low.",
            limits=up_to(1, 1.1),
            width=12,
        ),
    ),
)


SWAP = Section(
    "Swap",
    (
        plot(
            "Copied bytes",
            BYTES_S,
            Line("{{direction}}", Q.rate(w.SWAP_BYTES, "direction")),
        ),
        plot(
            "Time of a copy",
            SECONDS,
            Line("p50, {{direction}}", Q.quantile(0.5, w.SWAP, "direction")),
            Line("p99, {{direction}}", Q.quantile(0.99, w.SWAP, "direction")),
            limits=up_to(0.05, 0.5),
        ),
        plot(
            "Time spent copying",
            SHARE,
            Line("{{worker}}", Q.recorded(SWAPPING, "worker")),
            description="Share of time spent copying KV, by worker, over 5 minutes.",
            limits=up_to(0.1, SWAPPING_SHARE),
        ),
        plot(
            "Moved requests",
            REQUESTS_S,
            Line("offloaded", Q.rate(w.OFFLOADS)),
            Line("uploaded", Q.rate(w.UPLOADS)),
        ),
        plot(
            "Moved tokens",
            TOKENS_S,
            Line("offloaded", Q.rate(w.OFFLOADED_TOKENS)),
            Line("uploaded", Q.rate(w.UPLOADED_TOKENS)),
        ),
        plot(
            "Copy time per token, estimated and measured",
            SECONDS,
            Line("{{direction}}, estimated", Q.gauge(e.SWAP_TOKEN, "direction", agg="max")),
            Line("gather and quantize, estimated", Q.gauge(e.QUANTIZE_TOKEN, agg="max")),
            Line("offload, measured", _token_s("offload", w.OFFLOADED_TOKENS)),
            Line("upload, measured", _token_s("upload", w.UPLOADED_TOKENS)),
            description="Seconds per KV token: the cost model's estimates, and as measured.",
        ),
    ),
)


PRESSURE = Section(
    "Evictions and prefixes",
    (
        plot(
            "Evictions by handling of KV",
            REQUESTS_S,
            Line("{{kv}}", Q.rate(w.EVICTIONS, "kv")),
            limits=SELDOM,
            stacked=True,
        ),
        plot(
            "Dropped KV",
            REQUESTS_S,
            Line("dropped", Q.rate(w.DROPPED)),
            Line("host memory full", Q.rate(w.HOST_FULL)),
            limits=SELDOM,
        ),
        plot(
            "Dropped KV events",
            EVENTS_S,
            Line("{{worker}}", Q.rate(w.KV_EVENTS_DROPPED, "worker")),
            limits=SELDOM,
        ),
        plot(
            "Prefix cache hits by worker",
            SHARE,
            Line("{{worker}}", HITS_BY_WORKER),
            description=HITS_HELP,
            limits=at_least(0.1, 0),
            top=1,
        ),
        plot(
            "Blocks by size",
            COUNT,
            Line("{{num_gpu_blocks}} of {{block_size}} tokens", WORKERS_BY_SIZE),
            description="Workers by their number of KV blocks on the device and tokens per block.",
        ),
    ),
)


BOARD = Board(
    "Memory",
    "KV on the device and in host memory, its forecast peak, and its moves.",
    (GLANCE, BLOCKS, SWAP, PRESSURE),
)
