"""What the scheduler counts."""

from collections.abc import Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.runtime.telemetry import LATENCY_BUCKETS_S
from services.scheduler import events as ev
from services.scheduler.state import SchedulerState

ROUND_BUCKETS_S = (0.0001, 0.0002, 0.0005, *LATENCY_BUCKETS_S)


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
        self.usage = Gauge(
            "foretoken_kv_cache_usage_perc",
            "Share of a worker's KV blocks that somebody holds, 0 to 1, by its last report",
            ["worker"],
            registry=registry,
        )
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
            "foretoken_scheduler_round_seconds", "Time a planning round took in this process",
            buckets=ROUND_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.arranged = Counter(
            "foretoken_scheduler_rounds_arranged",
            "Rounds by who arranged them: a batcher of its own, or this process because that was "
            "late or gone, or its answer wrong",
            ["by"],
            registry=registry,
        )

    def stepped(self, event: ev.Event, actions: Sequence[ev.Action], state: SchedulerState) -> None:
        """Count one step of the state."""
        for action in actions:
            if isinstance(action, ev.Preempt):
                self.preemptions.inc()
            elif isinstance(action, ev.Refuse):
                self.refused.labels(action.reject.reason.value).inc()
        self.waiting.set(state.ledger.waiting)
        self.running.set(state.ledger.running)
        match event:
            case ev.WorkerAttached():
                self._tell_blocks(event.view.worker_id, state)
            case ev.Reported() | ev.WorkerLost():
                self._tell_blocks(event.worker_id, state)

    def _tell_blocks(self, worker_id: str, state: SchedulerState) -> None:
        """A worker's blocks as it last reported them; nothing of one that is gone."""
        worker = state.workers.get(worker_id)
        if worker:
            self.usage.labels(worker_id).set(worker.used_tokens / worker.view.kv_tokens)
            self.free.labels(worker_id).set(worker.free_blocks * worker.view.block_tokens)
            return
        for gauge in (self.usage, self.free):
            with suppress(KeyError):
                gauge.remove(worker_id)
