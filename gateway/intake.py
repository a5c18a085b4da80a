"""The intake of a request, from its arrival to a checked `GenerationRequest`.

Each step either continues or raises a ServiceError: admission before anything is read, the wait for
tokenization, then parsing and tokenization in threads.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf
from typing import TypeVar

from gateway.admission.admission_control import AdmissionControl
from gateway.admission.audit_log import AuditLog
from gateway.admission.caller import current_caller
from gateway.admission.key_limits import Grant, KeyLimiter
from gateway.admission.reservations import Reservations
from gateway.admission.tokenization_queue import TokenizationQueue
from gateway.config import GatewayConfig
from gateway.grammars.applied import apply_grammar, make_compiler
from gateway.metrics import Metrics
from gateway.readers.applied import AnswerReading
from gateway.request_tracing import NO_TRACE, RequestTrace
from gateway.requests.defaults import sampling_defaults
from gateway.requests.parser import Parser
from gateway.requests.prompts import tokenize_prompt
from gateway.requests.reading_pool import LARGE_BYTES, ReadingPool
from gateway.requests.size import PromptSizeLimit
from gateway.requests.text import Text
from gateway.sessions.sessions import Sessions
from gateway.types.client_request import (
    ClientRequest,
    count_prompt_bytes,
    count_tool_bytes,
)
from gateway.types.errors import KeyLimitReached, RequestRefused
from gateway.types.generation import ContextLimit, GenerationRequest, RequestArrival
from services.runtime.errors import Code, ServiceError
from services.sla import SlaMissCause

T = TypeVar("T")


class RequestIntake:
    """Admits, parses and tokenizes requests. Counts every refusal."""

    def __init__(
        self,
        config: GatewayConfig,
        text: Text,
        sessions: Sessions,
        metrics: Metrics,
        queue: TokenizationQueue,
        reading: ReadingPool,
        keys: KeyLimiter,
        reservations: Reservations,
        audit: AuditLog | None,
    ):
        """`queue`, `reading`, `keys`, `reservations` and `audit` are those of all models of the
        process."""
        self.draining = False
        self._config, self._text = config, text
        self._sessions, self._metrics = sessions, metrics
        defaults = sampling_defaults(config.model) if config.generation_config == "auto" else {}
        self._parser = Parser(config, text, lambda: secrets.randbits(63), defaults)
        self._size_limit = PromptSizeLimit(text.backend)
        self._reading, self._queue, self._audit = reading, queue, audit
        self._keys, self._reservations = keys, reservations
        self._admission = AdmissionControl(config.max_sessions, config.max_queued)
        self.grammars = make_compiler(config, text)
        self._answers = AnswerReading(text, config.tool_call_parser, config.reasoning_parser)

    @property
    def waiting(self) -> int:
        """Requests that wait for tokenization, of all models."""
        return self._queue.waiting + self._reading.waiting

    @property
    def context_limit(self) -> ContextLimit:
        """The longest prompt and answer that the fleet can hold."""
        return self._sessions.peers.fleet.context_limit_or(self._text.context_tokens)

    def on_tokens(self) -> None:
        """Tokens were received in this turn of the event loop."""
        self._queue.on_tokens()

    # Admission

    def admit(
        self,
        timeout_s: float = inf,
        choices: int = 1,
        sla_class: str = "",
        arrival_s: float | None = None,
    ) -> RequestArrival:
        """Admits a request of which nothing else has been read. Its time runs from `arrival_s`;
        None: from here. Raises ServiceError if it would be refused anyway. O(1)."""
        self.check_draining()
        timeout_s = min(timeout_s, self._config.default_deadline_s)
        since_s = time.monotonic() if arrival_s is None else arrival_s
        arrival = RequestArrival(since_s, timeout_s, sla_class)
        with self._counting_refusals(sla_class, choices):
            self._keys.check(current_caller().key, 1, time.monotonic(), self._drain_s)
            self._queue.check()
        self.check_room(choices, arrival)
        return arrival

    def has_room(self, timeout_s: float) -> bool:
        """Whether `admit` would admit one choice now. O(1)."""
        timeout_s = min(timeout_s, self._config.default_deadline_s)
        return not self.draining and self._find_refusal(1, timeout_s) is None

    def check_room(self, choices: int, arrival: RequestArrival) -> None:
        """Raises ServiceError if so many choices would be refused now. O(1)."""
        self._check_room(choices, arrival.deadline_s, arrival.sla_class)

    def check_requests(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises ServiceError if all choices of parsed requests would be refused now."""
        self.check_draining()
        choices = sum(request.sampling.n for request in requests)
        deadline_s = min((request.deadline_s for request in requests), default=inf)
        self._check_room(choices, deadline_s, requests[0].sla.name)

    async def reserve(self, requests: Sequence[GenerationRequest]) -> Grant | None:
        """The part of the key's limits that parsed requests take; None without limits. The caller
        settles it when their call has ended. Raises ServiceError if they are beyond the limits."""
        key = current_caller().key
        for request in requests:
            self._keys.check_class(key, request.sla.name)
        tokens = self._tokens_needed(requests)
        with self._counting_refusals(requests[0].sla.name, len(tokens)):
            return await self._reservations.reserve(key, tokens, self._drain_s)

    def check_draining(self) -> None:
        if self.draining:
            raise ServiceError(Code.UNAVAILABLE, "shutting down; retry elsewhere", 1.0)

    @property
    def admits_at_once(self) -> bool:
        """Whether `wait_for_turn` would not wait."""
        return self._queue.free

    async def wait_for_turn(self, sla_class: str = "") -> None:
        """Waits until the tokenization queue admits the request. Raises ServiceError."""
        with self._counting_refusals(sla_class):
            await self._queue.wait_for_turn()

    # Parsing

    async def parse(
        self, request: ClientRequest, arrival: RequestArrival, trace: RequestTrace = NO_TRACE
    ) -> GenerationRequest:
        """Raises ServiceError; for a client's mistake InvalidArgument, naming the field."""
        since_s = time.monotonic()
        limit = self.context_limit
        self._answers.check(request)
        size_bytes = count_prompt_bytes(request.prompt)
        self._size_limit.check(request, size_bytes, limit)
        parsing = partial(self._parser.parse, request, limit, arrival)
        size_bytes += count_tool_bytes(request.prompt)
        parsed = self._answers.apply(await self.read(parsing, size_bytes, arrival.sla_class))
        key_name = current_caller().key
        if (constraint := parsed.client.constraint) is not None:
            tenant = key_name or parsed.tenant  # clients choose the latter's name
            with self._counting_refusals(arrival.sla_class):
                parsed = apply_grammar(parsed, await self.grammars.compile(constraint, tenant))
        if key_name:
            client = replace(parsed.client, user=parsed.client.user or key_name)
            owner = "" if self._config.shares_prefixes(key_name) else key_name
            weight = self._keys.weight(key_name)
            parsed = replace(
                parsed, client=client, prefix_owner=owner, key_name=key_name, weight=weight
            )
        if trace is NO_TRACE:
            return parsed
        trace.on_tokenized(since_s, parsed.prompt_tokens)
        return replace(parsed, traceparent=trace.traceparent)

    async def tokenize(self, request: ClientRequest) -> Sequence[int]:
        """The tokens of a prompt or conversation of any length. Raises ServiceError."""
        size_bytes = count_prompt_bytes(request.prompt) + count_tool_bytes(request.prompt)
        return await self.read(partial(tokenize_prompt, self._text, request), size_bytes)

    def reads_quickly(self, size_bytes: int, request: ClientRequest) -> bool:
        """Whether texts of this size are read before their client could disconnect."""
        constraint = request.constraint
        compiled = constraint is None or self.grammars.knows(constraint)
        compiled &= request.tools is None  # they may become a constraint
        return size_bytes <= LARGE_BYTES and self._reading.free and compiled

    async def read(self, work: Callable[[], T], size_bytes: int, sla_class: str = "") -> T:
        """The result of `work` on a text of this size. Runs in a thread unless the text is below
        `read_at_once_bytes`. Raises ServiceError."""
        if size_bytes <= self._config.read_at_once_bytes:
            return work()
        with self._counting_refusals(sla_class):
            return await self._reading.run(work, size_bytes)

    def _tokens_needed(self, requests: Sequence[GenerationRequest]) -> Sequence[int]:
        """Tokens to reserve for each choice until its forecast is known."""
        most = self._config.key_reserve_tokens
        return [
            each.tokens_needed(choice, most)
            for each in requests
            for choice in range(each.sampling.n)
        ]

    @property
    def _drain_s(self) -> float:
        """Seconds until the scheduler's queue is empty."""
        return self._sessions.peers.fleet.drain_left_s(time.monotonic())

    def _check_room(self, choices: int, deadline_s: float, sla_class: str) -> None:
        with self._counting_refusals(sla_class, choices):
            refusal = self._find_refusal(choices, deadline_s - time.monotonic())
            if refusal is not None:
                raise refusal

    def _find_refusal(self, choices: int, timeout_s: float) -> RequestRefused | None:
        fleet, live = self._sessions.peers.fleet, len(self._sessions.table)
        return self._admission.find_refusal(live, choices, timeout_s, fleet, time.monotonic())

    @contextmanager
    def _counting_refusals(self, sla_class: str, choices: int = 1) -> Iterator[None]:
        try:
            yield
        except KeyLimitReached as refusal:  # the server keeps its SLA
            self._metrics.refusals.labels(refusal.reason.value).inc()
            self._record(refusal, sla_class)
            raise
        except RequestRefused as refusal:
            self._record(refusal, sla_class)
            name = self._metrics.class_label(sla_class or self._config.default_sla)
            self._metrics.on_refused(refusal.reason, name, choices)
            window = self._sessions.delivery.history.sla_window
            window.add(name, SlaMissCause.REJECTED, 0, time.monotonic(), choices)
            raise

    def _record(self, refusal: RequestRefused, sla_class: str) -> None:
        if self._audit is not None:
            what = {"model": self._config.model_name, "sla_class": sla_class}
            self._audit.write(current_caller(), what | {"refused": refusal.reason.value})
