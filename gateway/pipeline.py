"""The one path of every request: open, submit, place, feed, end — and again when a part is lost.

The pipeline owns the live sessions. It does no I/O of its own: messages leave through the two
`send` functions it is given and come in through `on_event` and `on_tokens`; `sweep` bounds every
wait. All of it runs on one event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from uuid import uuid4

from gateway import messages
from gateway.call import Call, Live
from gateway.config import GatewayConfig
from gateway.fleet import Fleet, read_fleet
from gateway.metrics import Metrics
from gateway.request import Generation
from gateway.session import News, Placement, Session
from gateway.text import Text
from protos import scheduler_pb2, worker_pb2
from services.core import FinishReason
from services.runtime.codec import decode_reason
from services.runtime.errors import Code, ServiceError

log = logging.getLogger(__name__)

DEADLINE_SLACK_S = 0.1  # what the scheduler gets to say so itself

ToScheduler = Callable[[scheduler_pb2.SubmitMessage], object]
ToWorker = Callable[[str, worker_pb2.WorkerInput], bool]  # whether it went out


class Pipeline:
    """Live sessions by the id that scheduler and workers know them by.

    Each submission of a session has an id of its own, so that what still comes for an earlier
    one changes nothing.
    """

    def __init__(
        self,
        config: GatewayConfig,
        text: Text,
        metrics: Metrics,
        to_scheduler: ToScheduler,
        to_worker: ToWorker,
    ):
        self.fleet = Fleet()
        self.connected = False  # whether the scheduler takes requests now
        self._config, self._text, self._metrics = config, text, metrics
        self._to_scheduler, self._to_worker = to_scheduler, to_worker
        self._lives: dict[str, Live] = {}
        self._unsubmitted: dict[int, Live] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.watch(self._count_running, lambda: self.live - self._count_running())

    @property
    def live(self) -> int:
        """Choices that are not over."""
        return len(self._lives) + len(self._unsubmitted)

    @property
    def addresses(self) -> set[str]:
        """Workers that are in the fleet or still hold a session."""
        placed = {live.place.address for live in self._lives.values()}
        return placed.union(self.fleet.addresses)

    async def wait_idle(self) -> None:
        """Until no choice is live."""
        await self._idle.wait()

    # The client's side

    def open(self, generations: Sequence[Generation]) -> Call:
        """Submit every choice of every prompt; raises RESOURCE_EXHAUSTED when that is too many.

        The caller must iterate the call's chunks or close it.
        """
        wanted = sum(generation.sampling.n for generation in generations)
        if self.live + wanted > self._config.max_sessions:
            retry_s = max(messages.MIN_RETRY_S, self.fleet.drain_s)
            limit = self._config.max_sessions
            raise ServiceError(
                Code.RESOURCE_EXHAUSTED, f"all {limit} places are taken; retry later", retry_s
            )
        call = Call(uuid4().hex, int(time.time()), self._pace_s, self._release)
        for generation in generations:
            self._metrics.prompt_tokens.inc(generation.prompt_tokens)
            for choice in range(generation.sampling.n):
                call.lives.append(self._make_live(call, generation, choice))
        now_s = time.monotonic()
        self._idle.clear()
        for live in call.lives:
            self._unsubmitted[id(live)] = live
            if self.connected:
                self._submit(live, now_s)
        return call

    def _make_live(self, call: Call, generation: Generation, choice: int) -> Live:
        sampling = generation.sampling
        session = Session(
            len(call.lives),
            sampling.max_tokens,
            generation.arrival_s,
            self._text.detokenizer(),
            sampling.stop,
            sampling.min_tokens,
        )
        return Live(session, generation, choice, call)

    def _pace_s(self) -> float:
        return min(self._config.max_pause_s, self.live / self._config.max_messages_per_s)

    def _release(self, call: Call) -> None:
        """Its client is gone or has everything: cancel what is still running."""
        now_s = time.monotonic()
        for live in call.lives:
            if not live.session.over:
                self._cancel(live, FinishReason.CANCELLED)
                self._end(live, FinishReason.CANCELLED, now_s)

    # The scheduler's side

    def on_scheduler_stream(self) -> None:
        """A new stream begins; nothing said on an earlier one counts. Until the scheduler
        answers on it, workers may still bring tokens for what was submitted before."""
        self.connected = False

    def on_event(self, event: scheduler_pb2.SchedulerEvent) -> None:
        now_s = time.monotonic()
        if event.WhichOneof("kind") == "fleet":
            self.fleet = read_fleet(event.fleet)
            if not self.connected:
                self._on_connected(now_s)
            return
        live = self._lives.get(event.request.request_id)
        if live is not None:
            self._on_request_event(live, event.request, now_s)

    def _on_connected(self, now_s: float) -> None:
        self.connected = True
        for live in list(self._lives.values()):
            self._withdraw(live)
        for live in list(self._unsubmitted.values()):
            self._submit(live, now_s)

    def _on_request_event(
        self, live: Live, event: scheduler_pb2.RequestEvent, now_s: float
    ) -> None:
        match event.WhichOneof("kind"):
            case "placed":
                self._on_placed(live, event.placed, now_s)
            case "preempted":
                live.session.line.on_preempted()
                live.place.running = False
            case "resumed":
                live.session.line.on_resumed(event.resumed.held_tokens > 0, now_s)
                live.place.running = True
            case "rejected":
                live.session.line.rejected = True
                refusal = messages.rejection(event.rejected, self.fleet.drain_s)
                self._end(live, FinishReason.ERROR, now_s, refusal)
            case "finished":
                self._on_finished(live, event.finished, now_s)

    def _on_placed(self, live: Live, placed: scheduler_pb2.Placed, now_s: float) -> None:
        live.place.address, live.place.running = placed.worker_address, True
        live.session.line.placed_s = min(live.session.line.placed_s, now_s)
        live.place.prompted = self._to_worker(placed.worker_address, self._prompt(live))

    def _on_finished(self, live: Live, finished: scheduler_pb2.Finished, now_s: float) -> None:
        reason = decode_reason(finished.reason) or FinishReason.ERROR
        if reason in (FinishReason.STOP, FinishReason.LENGTH):  # its tokens may be on their way
            live.place.due_tokens, live.place.due_reason = finished.output_tokens, reason
            live.place.due_s = now_s + self._config.finish_wait_s
        elif reason is FinishReason.DEADLINE:
            self._end(live, reason, now_s)
        else:
            message = finished.message or f"the request ended with {reason.value}"
            code = Code.INTERNAL if reason is FinishReason.ERROR else Code.UNAVAILABLE
            self._end(live, reason, now_s, ServiceError(code, message))

    # The workers' side

    def on_worker_stream(self, address: str) -> list[worker_pb2.WorkerInput]:
        """A new stream begins; returns the prompts it must open with. Of a session prompted on
        an earlier one, tokens may be lost: it is resubmitted."""
        now_s = time.monotonic()
        placed = [live for live in self._lives.values() if live.place.address == address]
        for live in placed:
            if live.place.prompted:
                self._resubmit(live, now_s)
        waiting = [live for live in placed if live.place.address == address]
        for live in waiting:
            live.place.prompted = True
        return [self._prompt(live) for live in waiting]

    def on_tokens(self, batch: worker_pb2.TokenBatch) -> None:
        """One engine step's tokens. O(tokens): a dict lookup, a slice and a decode each."""
        now_s = time.monotonic()
        total = 0
        for tokens in batch.requests:
            live = self._lives.get(tokens.request_id)
            if live is not None:
                total += self._feed(live, tokens, now_s)
        self._metrics.generation_tokens.inc(total)

    def _feed(self, live: Live, tokens: worker_pb2.RequestTokens, now_s: float) -> int:
        session = live.session
        had = len(session.output)
        reason = decode_reason(tokens.finish_reason) if tokens.finish_reason else None
        if reason is FinishReason.ERROR:
            message = tokens.message or "the worker failed; retry is safe"
            self._end(live, reason, now_s, ServiceError(Code.INTERNAL, message))
            return 0
        news = session.feed(tokens.offset, tokens.token_ids, tokens.logprobs, reason, now_s)
        if news is News.GAP:
            self._resubmit(live, now_s)
        elif news is News.END:
            if session.stopped_by_text and reason is None:
                self._cancel(live, FinishReason.STOP)
            self._forget(live, session.reason or FinishReason.ERROR)
        if news is not News.NONE:
            live.call.notify(session, now_s)
        fresh = len(session.output) - had
        if fresh and session.line.gap_s is not None:
            self._metrics.gaps.observe(session.line.gap_s)
        return fresh

    def _prompt(self, live: Live) -> worker_pb2.WorkerInput:
        output = live.session.output
        return messages.prompt(live.place.wire_id, live.generation, live.choice, output)

    # Submission, and what ends it

    def _submit(self, live: Live, now_s: float) -> None:
        self._unsubmitted.pop(id(live), None)
        if live.session.full:
            self._end(live, FinishReason.LENGTH, now_s)
            return
        attempts = live.place.attempts
        if attempts >= self._config.max_attempts:
            failure = ServiceError(Code.UNAVAILABLE, f"gave up after {attempts} attempts")
            self._end(live, FinishReason.ERROR, now_s, failure)
            return
        self._metrics.resubmissions.inc(attempts > 0)
        wire_id = f"{live.call.request_id}-{live.session.index}" + f"~{attempts}" * (attempts > 0)
        live.place = Placement(wire_id, attempts + 1)
        self._lives[wire_id] = live
        delivered = len(live.session.output)
        self._to_scheduler(messages.new_request(wire_id, live.generation, delivered, now_s))

    def _withdraw(self, live: Live) -> None:
        """Forget its present submission; it waits for the next."""
        self._lives.pop(live.place.wire_id, None)
        live.place = Placement("", live.place.attempts)
        live.session.line.on_preempted()
        self._unsubmitted[id(live)] = live

    def _resubmit(self, live: Live, now_s: float) -> None:
        """Its tokens were lost between worker and gateway: the one recovery path."""
        self._cancel(live, FinishReason.CANCELLED)
        self._withdraw(live)
        if self.connected:
            self._submit(live, now_s)

    def _cancel(self, live: Live, reason: FinishReason) -> None:
        if live.place.wire_id:
            output_tokens = len(live.session.output)
            self._to_scheduler(messages.cancel(live.place.wire_id, reason, output_tokens))

    def _end(
        self, live: Live, reason: FinishReason, now_s: float, failure: Exception | None = None
    ) -> None:
        live.session.end(reason, now_s, failure)
        self._forget(live, live.session.reason or reason)
        live.call.notify(live.session, now_s)

    def _forget(self, live: Live, reason: FinishReason) -> None:
        self._unsubmitted.pop(id(live), None)
        self._lives.pop(live.place.wire_id, None)
        self._metrics.on_end(live.generation, live.session, reason)
        if not self.live:
            self._idle.set()

    # Bounds on every wait

    def sweep(self, now_s: float, scheduler_lost_s: float) -> None:
        """What has waited too long: called a few times a second, O(live)."""
        for live in self._all():
            if now_s > live.generation.deadline_s + DEADLINE_SLACK_S:
                self._cancel(live, FinishReason.CANCELLED)
                self._end(live, FinishReason.DEADLINE, now_s)
            elif scheduler_lost_s > self._config.scheduler_wait_s:
                failure = ServiceError(Code.UNAVAILABLE, "the scheduler cannot be reached")
                self._end(live, FinishReason.ERROR, now_s, failure)
            elif now_s > live.place.due_s:
                self._settle(live, now_s)
            elif live.call.waits_for_client:
                self._mind_client(live.call, now_s)

    def _settle(self, live: Live, now_s: float) -> None:
        """The scheduler says it is finished, and its worker has not said so in time."""
        reason = live.place.due_reason
        if reason is not None and len(live.session.output) >= live.place.due_tokens:
            self._end(live, reason, now_s)
        else:
            self._resubmit(live, now_s)

    def _mind_client(self, call: Call, now_s: float) -> None:
        if now_s - call.taken_s > self._config.client_stall_s:
            log.info("a client took nothing for %g s and is let go", now_s - call.taken_s)
            call.close()
            if call.owner is not None:
                call.owner.cancel()

    def _all(self) -> Iterable[Live]:
        return [*self._lives.values(), *self._unsubmitted.values()]

    def _count_running(self) -> int:
        return sum(live.place.running for live in self._lives.values())
