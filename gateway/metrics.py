"""What Prometheus reads of the gateway; names as in vLLM, with our prefix."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from math import inf

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from gateway.requests.parser import Generation
from gateway.sessions.session import Session
from services.core import FinishReason
from services.runtime.telemetry import LATENCY_BUCKETS_S
from services.verdict import verdict


class GapHistogram(Collector):
    """Gaps between tokens. Counted without locks or labels: it is on the path of every token."""

    NAME = "foretoken_inter_token_latency_seconds"

    def __init__(self) -> None:
        self._counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, gap_s: float) -> None:
        self._counts[bisect_left(LATENCY_BUCKETS_S, gap_s)] += 1
        self._sum_s += gap_s

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self.NAME, "Time between two token messages of a request.")
        buckets, total = [], 0
        for bound, count in zip((*LATENCY_BUCKETS_S, inf), self._counts, strict=True):
            total += count
            name = floatToGoString(bound)  # type: ignore[no-untyped-call]  # the library has no types
            buckets.append((str(name), float(total)))
        family.add_metric([], buckets, self._sum_s)
        yield family


class Metrics:
    """All of the gateway's instruments in one registry."""

    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self.gaps = GapHistogram()
        registry.register(self.gaps)
        self._ttft = _latency("time_to_first_token", "From arrival to the first token.", registry)
        self._tpot = _latency("time_per_output_token", "Mean a request, after its first.", registry)
        self._e2e = _latency("e2e_request_latency", "From arrival to the end.", registry)
        self._queue = _latency("request_queue_time", "From arrival to placement.", registry)
        self._success = Counter(
            "foretoken_request_success_total", "Ended requests.", ["finished_reason"],
            registry=registry,
        )  # fmt: skip
        self._sla = Counter(
            "foretoken_sla_total", "SLAs kept and missed.", ["class", "verdict", "cause"],
            registry=registry,
        )  # fmt: skip
        self.prompt_tokens = _count("prompt_tokens", "Prompt tokens accepted.", registry)
        self.generation_tokens = _count("generation_tokens", "Tokens from workers.", registry)
        self.resubmissions = Counter(
            "foretoken_resubmissions_total", "Requests submitted again, by what was lost.",
            ["cause"], registry=registry,
        )  # fmt: skip
        self.announcements = _count(
            "announcements", "Requests a new scheduler was told of, going on meanwhile.", registry
        )
        self.refusals = Counter(
            "foretoken_refusals_total", "Requests refused unread, by what stood in the way.",
            ["bar"], registry=registry,
        )  # fmt: skip
        self._registry = registry

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """The gauges, read when Prometheus asks."""
        for name, text, count in (
            ("running", "Choices placed on a worker.", running),
            ("waiting", "Choices not placed yet.", waiting),
        ):
            gauge = Gauge(f"foretoken_num_requests_{name}", text, registry=self._registry)
            gauge.set_function(count)

    def on_end(self, generation: Generation, session: Session, reason: FinishReason) -> None:
        """Account for a choice that is over."""
        line = session.line
        cause = verdict(generation.sla, line, reason)
        self._success.labels("rejected" if line.rejected else reason.value).inc()
        self._sla.labels(generation.sla.name, "missed" if cause else "met", cause.value).inc()
        self._e2e.observe(line.ended_s - line.arrival_s)
        self._queue.observe(line.queued_s)
        if line.tokens:
            self._ttft.observe(line.ttft_s)
        if line.tokens > 1:
            self._tpot.observe(line.tpot_s)


def _latency(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(
        f"foretoken_{name}_seconds", text, buckets=LATENCY_BUCKETS_S, registry=registry
    )


def _count(name: str, text: str, registry: CollectorRegistry) -> Counter:
    return Counter(f"foretoken_{name}_total", text, registry=registry)
