"""What the scheduler counts."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.runtime.telemetry import LATENCY_BUCKETS_S
from services.scheduler import events as ev
from services.scheduler.state import SchedulerState


class SchedulerMetrics:
    """Prometheus series of one scheduler, in the registry given."""

    def __init__(self, registry: CollectorRegistry):
        self.waiting = Gauge(
            "foretoken_scheduler_requests_waiting", "Requests in the queue", registry=registry
        )
        self.running = Gauge(
            "foretoken_scheduler_requests_running",
            "Requests admitted to a worker",
            registry=registry,
        )
        self.held = Gauge(
            "foretoken_kv_cache_usage_perc", "Share of all KV tokens held, 0 to 1",
            registry=registry,
        )  # fmt: skip
        self.free = Gauge(
            "foretoken_kv_free_tokens",
            "KV tokens in free blocks, by the worker's last report",
            ["worker"],
            registry=registry,
        )
        self.preemptions = Counter(
            "foretoken_num_preemptions",
            "Requests paused, evicted or lost, and requeued",
            registry=registry,
        )
        self.refused = Counter(
            "foretoken_requests_refused", "Requests refused", ["reason"], registry=registry
        )
        self.fallbacks = Counter(
            "foretoken_forecast_fallbacks",
            "Forecasts made from the scheduler's own history: the predictor's came late, its call "
            "failed, or it is not asked for a while (open)",
            ["reason"],
            registry=registry,
        )
        self.forecasts_replaced = Counter(
            "foretoken_forecasts_replaced",
            "Forecasts replaced by better ones: a late answer, or one the predictor improved",
            ["by"],
            registry=registry,
        )
        self.breaker = Gauge(
            "foretoken_forecast_breaker",
            "Whether the predictor is asked (closed), not asked (open), or tried (half_open)",
            ["phase"],
            registry=registry,
        )
        self.advice_dropped = Counter(
            "foretoken_advice_dropped",
            "Outcomes and timings never told because too many waited for a service that is away",
            ["kind"],
            registry=registry,
        )
        self.round_seconds = Histogram(
            "foretoken_batcher_round_seconds", "Time the batcher took to answer a round",
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip

    def stepped(self, event: ev.Event, actions: Sequence[ev.Action], state: SchedulerState) -> None:
        """Count one step of the state."""
        for action in actions:
            if isinstance(action, ev.Preempt):
                self.preemptions.inc()
            elif isinstance(action, ev.Refuse):
                self.refused.labels(action.reject.reason.value).inc()
        self.waiting.set(len(state.ledger.queue))
        self.running.set(sum(len(w.running) for w in state.workers.values()))
        if isinstance(event, ev.WorkerAttached):
            self.free.labels(event.view.worker_id).set(event.view.kv_tokens)
        if isinstance(event, ev.Reported):
            self.free.labels(event.worker_id).set(event.report.free_tokens)
            total = sum(w.view.kv_tokens for w in state.workers.values())
            held = sum(w.held_tokens for w in state.workers.values())
            self.held.set(held / total if total else 0.0)
