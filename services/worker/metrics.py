"""The worker's Prometheus metrics: the engine's counters are read at each scrape; steps are counted
here."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from prometheus_client import CollectorRegistry

from observability.metrics import worker as catalogue
from observability.metrics.instruments import OTHER, BoundedLabels, Instruments
from observability.metrics.metric import Metric
from services.costs import Direction
from services.worker.engine.interface import EngineState
from services.worker.engine.phase_clock import EnginePhase, PhaseClock
from services.worker.requests.types.batch import StepResult
from services.worker.requests.types.limits import Counters

# Fields of Counters that are metrics.
COUNTED: Mapping[str, Metric] = {
    "offloads": catalogue.OFFLOADS,
    "offloaded_tokens": catalogue.OFFLOADED_TOKENS,
    "uploads": catalogue.UPLOADS,
    "uploaded_tokens": catalogue.UPLOADED_TOKENS,
    "dropped": catalogue.DROPPED,
    "host_full": catalogue.HOST_FULL,
    "prefix_asked_tokens": catalogue.PREFIX_QUERIES,
    "prefix_hit_tokens": catalogue.PREFIX_HITS,
    "padding_tokens": catalogue.PADDING,
    "padding_left_out_tokens": catalogue.PADDING_LEFT_OUT,
    "invalid_tokens": catalogue.INVALID,
    "stray_rows": catalogue.STRAY,
    "drafts": catalogue.DRAFTS,
    "draft_tokens": catalogue.DRAFT_TOKENS,
    "accepted_tokens": catalogue.ACCEPTED_TOKENS,
}


class WorkerMetrics:
    """Prometheus metrics of one worker. A block takes `host_block_bytes` of host memory, on all
    ranks. Work before the creation, such as the profile, is not counted."""

    def __init__(
        self,
        registry: CollectorRegistry,
        state: EngineState,
        phases: PhaseClock,
        host_block_bytes: int,
    ):
        make = Instruments(registry)
        self._decoded = make.counter(catalogue.DECODED)
        self._prefilled = make.counter(catalogue.PREFILLED)
        self._step = make.histogram(catalogue.STEP)
        self._batch_tokens = make.histogram(catalogue.BATCH_TOKENS)
        self._swap = make.histogram(catalogue.SWAP, *Direction)
        self._swap_bytes = make.counter(catalogue.SWAP_BYTES, *Direction)
        self._adapter_requests = make.counter(catalogue.ADAPTER_REQUESTS, OTHER)
        self._adapters = BoundedLabels()  # bounded: clients may load adapters
        self._block_tokens = state.limits.block_tokens
        self._block_bytes = host_block_bytes
        _read_memory(make, state)
        _read_counters(make, state.counters)
        _read_phases(make, phases)

    def record_request(self, adapter: str) -> None:
        """Counts a request that has arrived, if it has an adapter."""
        if adapter:
            self._adapter_requests.labels(self._adapters.label(adapter)).inc()

    def record_tokens(self, tokens: int) -> None:
        """Counts tokens of requests of a static batch that ended between two steps."""
        self._decoded.inc(tokens)

    def record_step(self, result: StepResult) -> None:
        self._decoded.inc(len(result.tokens))
        for timing in result.timings:
            self._prefilled.inc(timing.prefill_tokens)
            self._step.observe(timing.elapsed_s)
            self._batch_tokens.observe(timing.prefill_tokens + timing.decode_seqs)
        for swap in result.swaps:
            blocks = -(-swap.tokens // self._block_tokens)
            self._swap.labels(swap.direction.value).observe(swap.elapsed_s)
            self._swap_bytes.labels(swap.direction.value).inc(blocks * self._block_bytes)


def _read_memory(make: Instruments, state: EngineState) -> None:
    """Reads the state's current pools: a reset creates new ones."""
    make.reading(catalogue.RUNNING, lambda: len(state.running))
    make.reading(catalogue.RESTING, lambda: state.host.owner_count)
    make.reading(catalogue.USAGE, lambda: state.pool.usage)
    make.reading(catalogue.HOST_USAGE, lambda: state.host.usage)
    make.reading(catalogue.BLOCKS, lambda: _blocks(state))
    make.reading(catalogue.BLOCK_TOKENS, lambda: state.limits.block_tokens)
    sizes = (str(state.limits.block_tokens), str(state.pool.blocks))
    make.gauge(catalogue.CACHE_CONFIG).labels(*sizes).set(1)


def _blocks(state: EngineState) -> Mapping[str, float]:
    """Block counts by state; those of the device add up to its pool, those of the host to its
    pool."""
    pool, host = state.pool, state.host
    free, cached, host_free = pool.blank_blocks, pool.cached_blocks, host.free_blocks
    return {
        "held": pool.blocks - free - cached,
        "cached": cached,
        "free": free,
        "resting": host.blocks - host_free,
        "host_free": host_free,
    }


def _read_counters(make: Instruments, counters: Counters) -> None:
    before = replace(counters)

    def since(field: str) -> int:
        return int(getattr(counters, field) - getattr(before, field))

    for field, metric in COUNTED.items():
        make.reading(metric, partial(since, field))
    make.reading(
        catalogue.EVICTIONS,
        lambda: {kv: since(f"evicted_{kv}") for kv in ("offloaded", "dropped")},
    )


def _read_phases(make: Instruments, clock: PhaseClock) -> None:
    before = list(clock.seconds)

    def phases() -> Mapping[str, float]:
        return {p.name.lower(): clock.seconds[p] - before[p] for p in EnginePhase}

    make.reading(catalogue.PHASES, phases)
    make.reading(catalogue.BUSY, lambda: sum(clock.seconds) - sum(before))
