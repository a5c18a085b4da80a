"""What a worker counts; names follow vLLM's after the prefix."""

from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.core import Report
from services.runtime.telemetry import LATENCY_BUCKETS_S
from services.worker.batch import StepResult
from services.worker.state import WorkerState

# Fields of Tally, as they are counted.
MOVED = {
    "offloads": "Requests whose KV went to host memory",
    "offloaded_tokens": "Their tokens of KV",
    "uploads": "Requests whose KV came back from host memory",
    "uploaded_tokens": "Their tokens of KV",
    "dropped": "Requests whose KV was let go, to be computed again",
    "host_full": "Of those, the ones that host memory had no room for",
    "prefix_asked_tokens": "Tokens of prompts, and of what is computed again, looked up",
    "prefix_hit_tokens": "Of those, the ones whose KV was there already",
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
        running = Gauge(
            "foretoken_num_requests_running", "Admitted, not finished", registry=registry
        )
        running.set_function(lambda: len(state.running))
        usage = Gauge(
            "foretoken_kv_cache_usage_perc", "Share of KV blocks in use", registry=registry
        )
        usage.set_function(lambda: 1 - state.pool.free_blocks / state.pool.blocks)

        host = Gauge(
            "foretoken_host_kv_cache_usage_perc", "Share of the host pool's blocks in use",
            registry=registry,
        )  # fmt: skip
        host.set_function(lambda: 1 - state.host.free_blocks / max(1, state.host.blocks))
        self._tally = state.tally
        self._counted = replace(state.tally)  # not what the profile moved
        self._moved = {
            name: Counter(f"foretoken_{name}", text, registry=registry)
            for name, text in MOVED.items()
        }
        self._swap_s = Histogram(
            "foretoken_swap_seconds", "Time to copy one request's KV between device and host",
            ["direction"], buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip

    def stepped(self, result: StepResult) -> None:
        self._generated.inc(len(result.tokens))
        self._prefilled.inc(result.timing.prefill_tokens)
        self._step_s.observe(result.timing.elapsed_s)

    def reported(self, report: Report) -> None:
        self._preempted.inc(len(report.evicted))
        for swap in report.swaps:
            self._swap_s.labels(swap.direction.value).observe(swap.elapsed_s)
        for name, counter in self._moved.items():
            counter.inc(getattr(self._tally, name) - getattr(self._counted, name))
        self._counted = replace(self._tally)
