"""What a worker counts; names follow vLLM's after the prefix."""

from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.core import Report
from services.runtime.telemetry import LATENCY_BUCKETS_S
from services.worker.requests.batch import StepResult
from services.worker.requests.state import WorkerState

# Each field of Counters: the series that counts it, and what it says.
MOVED = {
    "offloads": ("kv_offloads", "Requests whose KV went to host memory"),
    "offloaded_tokens": ("kv_offloaded_tokens", "Tokens of KV that went to host memory"),
    "uploads": ("kv_uploads", "Requests whose KV came back from host memory"),
    "uploaded_tokens": ("kv_uploaded_tokens", "Tokens of KV that came back from host memory"),
    "dropped": ("kv_dropped", "Requests whose KV was let go, to be computed again"),
    "host_full": ("kv_host_full", "Of those, the ones that host memory had no room for"),
    "prefix_asked_tokens": ("prefix_cache_queries", "Tokens of prefills looked up"),
    "prefix_hit_tokens": ("prefix_cache_hits", "Of those, the ones whose KV was there already"),
    "padding_tokens": ("worker_padding_tokens", "Tokens prefilled as padding of static batches"),
    "padding_left_out_tokens": (
        "worker_padding_left_out_tokens",
        "Padding of static batches that memory had no room for, or that broke a step",
    ),
    "invalid_tokens": (
        "worker_invalid_tokens",
        "Tokens drawn after a request's end, while its static batch went on",
    ),
    "stray_rows": (
        "worker_stray_rows",
        "Rows computed a step ahead for requests that had ended or gone by then",
    ),
}


class WorkerMetrics:
    """Prometheus series of one worker, in the registry given; gauges read the state."""

    def __init__(self, registry: CollectorRegistry, state: WorkerState):
        self._generated = Counter("foretoken_generation_tokens", "Tokens drawn", registry=registry)
        self._prefilled = Counter(
            "foretoken_prompt_tokens", "Tokens prefilled, recomputed ones too", registry=registry
        )
        self._preempted = Counter(
            "foretoken_num_preemptions", "Evictions for memory", registry=registry
        )
        self._step_s = Histogram(
            "foretoken_step_seconds", "Time of an engine step",
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        _gauges(registry, state)
        self._counters = state.counters
        self._counted = replace(state.counters)  # not what the profile moved
        self._moved = {
            field: Counter(f"foretoken_{name}", text, registry=registry)
            for field, (name, text) in MOVED.items()
        }
        self._swap_s = Histogram(
            "foretoken_swap_seconds", "Time to copy one request's KV between device and host",
            ["direction"], buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip

    def told(self, tokens: int) -> None:
        """So many were told whose static batch was over between two steps."""
        self._generated.inc(tokens)

    def stepped(self, result: StepResult) -> None:
        self._generated.inc(len(result.tokens))
        for timing in result.timings:
            self._prefilled.inc(timing.prefill_tokens)
            self._step_s.observe(timing.elapsed_s)

    def reported(self, report: Report) -> None:
        self._preempted.inc(len(report.evicted))
        for swap in report.swaps:
            self._swap_s.labels(swap.direction.value).observe(swap.elapsed_s)
        for field, counter in self._moved.items():
            counter.inc(getattr(self._counters, field) - getattr(self._counted, field))
        self._counted = replace(self._counters)


def _gauges(registry: CollectorRegistry, state: WorkerState) -> None:
    """Read by another thread than the engine's, so from counts alone: nothing is walked over."""

    def gauge(name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(f"foretoken_{name}", text, registry=registry).set_function(value)

    gauge("num_requests_running", "Admitted, not finished", lambda: len(state.running))
    gauge(
        "num_requests_swapped",
        "Requests whose KV rests in host memory",
        lambda: len(state.host.owners()),
    )
    gauge("kv_cache_usage_perc", "Share of KV blocks in use", lambda: state.pool.usage)
    gauge("host_kv_cache_usage_perc", "The same of the host pool", lambda: state.host.usage)
