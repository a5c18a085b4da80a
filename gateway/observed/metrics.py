"""What Prometheus reads of the gateway, by the catalogue: requests as their clients saw them."""

from collections.abc import Callable, Mapping
from math import inf

from prometheus_client import CollectorRegistry

from gateway.admission.door import Bar
from gateway.requests.sla import OTHER
from gateway.sessions.delivery import Ended
from gateway.sessions.placement import Cause as Lost
from observability.metrics import gateway as catalogue
from observability.metrics.instruments import Instruments
from services.core import FinishReason, Sla
from services.sla import SlaMissCause

REJECTED = "rejected"
MET, MISSED = "met", "missed"


class Metrics:
    """All of the gateway's instruments in one registry. What an event loop counts for every token
    or request is counted without locks."""

    def __init__(self, registry: CollectorRegistry, slas: Mapping[str, Sla] | None = None):
        """`slas`: the classes that a request can name, which alone become labels."""
        make = Instruments(registry)
        self.registry = registry
        self.gaps = make.lean(catalogue.GAP).labels()
        self.prompt_tokens = make.counter(catalogue.PROMPT_TOKENS)
        self.generation_tokens = make.counter(catalogue.GENERATION_TOKENS)
        self.resubmissions = make.counter(catalogue.RESUBMISSIONS)
        self.announcements = make.counter(catalogue.ANNOUNCEMENTS)
        self.refusals = make.counter(catalogue.REFUSALS)
        self.peers_missing = make.gauge(catalogue.PEERS_MISSING)
        self._slas = slas or {}
        self._running = make.gauge(catalogue.RUNNING)
        self._waiting = make.gauge(catalogue.WAITING)
        self._ttft = make.lean(catalogue.TTFT)
        self._tpot = make.lean(catalogue.TPOT)
        self._mtpot = make.lean(catalogue.MTPOT)
        self._e2e = make.lean(catalogue.E2E)
        self._queue = make.lean(catalogue.QUEUE).labels()
        self._prefill = make.lean(catalogue.PREFILL).labels()
        self._decode = make.lean(catalogue.DECODE).labels()
        self._success = make.counter(catalogue.SUCCESS)
        self._sla = make.counter(catalogue.SLA)
        self._goodput_tokens = make.counter(catalogue.GOODPUT_TOKENS)
        self._begin()

    def _begin(self) -> None:
        """What has labels begins at 0: the first of a kind is an increase, too."""
        for reason in (*(reason.value for reason in FinishReason), REJECTED):
            self._success.labels(reason)
        for name in (*self._slas, OTHER):
            self._goodput_tokens.labels(name)
            for by_class in (self._ttft, self._tpot, self._mtpot, self._e2e):
                by_class.labels(name)
            for cause in SlaMissCause:
                self._sla.labels(name, MISSED if cause else MET, cause.value)
        for lost in Lost:
            self.resubmissions.labels(lost.value)
        for bar in Bar:
            self.refusals.labels(bar.value)

    def watch(self, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """The gauges, read when Prometheus asks."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def known(self, asked: str) -> str:
        """The class of that name, where there is one: no word of a client's."""
        return asked if asked in self._slas else OTHER

    def on_refused(self, bar: Bar, name: str, choices: int) -> None:
        """So many choices of a class were refused before they were let in."""
        self.refusals.labels(bar.value).inc()
        self._sla.labels(name, MISSED, SlaMissCause.REJECTED.value).inc(choices)

    def on_settled(self, ended: Ended) -> None:
        """A choice is over, and its client has all of it that it will ever have."""
        line, cause, name = ended.line, ended.cause, self.known(ended.sla.name)
        self._success.labels(REJECTED if line.rejected else ended.reason.value).inc()
        self._sla.labels(name, MISSED if cause else MET, cause.value).inc()
        if not cause:
            self._goodput_tokens.labels(name).inc(line.tokens)
        if line.rejected:
            return
        self._e2e.labels(name).observe(line.ended_s - line.arrival_s)
        self._queue.observe(line.queued_s)
        if line.tokens:
            self._ttft.labels(name).observe(line.ttft_s)
            self._decode.observe(line.decode_s)
            if line.placed_s < inf:
                self._prefill.observe(line.first_token_s - line.placed_s)
        if line.tokens > 1:
            self._tpot.labels(name).observe(line.tpot_s)
            self._mtpot.labels(name).observe(line.longest_gap_s)
