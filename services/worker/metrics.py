"""What a worker counts; names follow vLLM's after the prefix."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.core import Report
from services.runtime.telemetry import LATENCY_BUCKETS_S
from services.worker.batch import StepResult
from services.worker.state import WorkerState


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

    def stepped(self, result: StepResult) -> None:
        self._generated.inc(len(result.tokens))
        self._prefilled.inc(result.timing.prefill_tokens)
        self._step_s.observe(result.timing.elapsed_s)

    def reported(self, report: Report) -> None:
        self._preempted.inc(len(report.evicted))
