"""The one path of every request: open, submit, place, feed, end — and again when a part is lost.

The pipeline decides over the live sessions. It does no I/O of its own: messages leave through the
two `send` functions it is given and come in through `on_event` and `on_tokens`; `sweep` bounds
every wait. All of it runs on one event loop.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from math import inf
from uuid import uuid4

from gateway.admission.door import Door
from gateway.admission.retries import RetryBudget
from gateway.config import GatewayConfig
from gateway.observed.forecast_metrics import ForecastMetrics
from gateway.observed.metrics import Metrics
from gateway.peers import messages
from gateway.peers.fleet import Fleet, read_fleet
from gateway.requests.parser import Generation
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall, Live
from gateway.sessions.delivery import Ended
from gateway.sessions.foresight import Foresight
from gateway.sessions.placement import Cause, Due
from gateway.sessions.promises import Promises
from gateway.sessions.roster import Roster, ToScheduler
from gateway.sessions.session import News, Session
from gateway.sessions.verdicts import Verdicts
from protos.generated import scheduler_pb2, worker_pb2
from services.core import FinishReason
from services.runtime.codecs.common import decode_reason
from services.runtime.errors import Code, ServiceError

log = logging.getLogger(__name__)

DEADLINE_SLACK_S = 0.1  # what the scheduler gets to say so itself

ToWorker = Callable[[str, worker_pb2.WorkerInput], bool]  # whether it went out


class Pipeline:
    """What each message and each moment means for the live sessions."""

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
        self.verdicts = Verdicts(config.verdicts_kept)
        self._config, self._text, self._metrics = config, text, metrics
        self._forecasts, self._promises = ForecastMetrics(metrics.registry), Promises()
        self._to_worker = to_worker
        self._door = Door(config.max_sessions, config.max_queued)
        self._retries = RetryBudget(config.retry_share, config.retry_floor_per_s)
        self._roster = Roster(to_scheduler)
        self._streams: set[str] = set()  # addresses of workers to which one is open
        self._heard: set[str] = set()  # those of which something came since the last sweep
        self._swept_s = inf
        self._idle = asyncio.Event()
        self._idle.set()
        running = self._roster.count_running
        metrics.watch(running, lambda: self.live - running())

    @property
    def live(self) -> int:
        """Choices that are not over."""
        return len(self._roster)

    @property
    def addresses(self) -> set[str]:
        """Workers that are in the fleet or still hold a session."""
        return self._roster.addresses().union(self.fleet.addresses)

    async def wait_idle(self) -> None:
        """Until no choice is live."""
        await self._idle.wait()

    # The client's side

    def check_room(self, wanted: int, timeout_s: float, now_s: float) -> None:
        """Raises Refused when `wanted` more choices are too many, or can't be in time. O(1)."""
        refusal = self._door.refusal(self.live, wanted, timeout_s, self.fleet, now_s)
        if refusal is not None:
            raise refusal

    def open(self, generations: Sequence[Generation], whole: bool = False) -> ClientCall:
        """Submit every choice of every prompt; raises Refused where `check_room` does.

        The caller must iterate the call's chunks or close it; where it sends it `whole`, close it.
        """
        now_s = time.monotonic()
        wanted = sum(generation.sampling.n for generation in generations)
        deadline_s = min((generation.deadline_s for generation in generations), default=inf)
        self.check_room(wanted, deadline_s - now_s, now_s)
        named = next((each.request_id for each in generations), "")
        call = ClientCall(_unique(named), int(time.time()), self, whole, named)
        for generation in generations:
            self._metrics.prompt_tokens.inc(generation.prompt_tokens)
            hashes = self.fleet.hashes_of(generation)
            for choice in range(generation.sampling.n):
                call.lives.append(self._make_live(call, generation, choice, hashes))
        self._idle.clear()
        for live in call.lives:
            self._retries.on_submitted(now_s)
            self._roster.add(live)
            if self.connected:
                self._roster.submit(live, now_s)
        return call

    def _make_live(
        self, call: ClientCall, generation: Generation, choice: int, hashes: bytes
    ) -> Live:
        sampling, foresight = generation.sampling, None
        if generation.include_forecast:
            foresight = Foresight(
                generation.sla, sampling.max_tokens, generation.arrival_s, self._promises
            )
        session = Session(
            len(call.lives),
            sampling.max_tokens,
            generation.arrival_s,
            self._text.detokenizer(sampling),
            sampling.stop,
            sampling.min_tokens,
            foresight,
            sampling.include_stop_str_in_output,
        )
        return Live(session, generation, choice, call, hashes)

    # What a call tells of itself

    def pace_s(self) -> float:
        return min(self._config.max_pause_s, self.live / self._config.max_messages_per_s)

    def release(self, call: ClientCall) -> None:
        """Its client is gone or has everything: cancel what is still running."""
        now_s = time.monotonic()
        for live in call.lives:
            if not live.session.over:
                self._roster.cancel(live, FinishReason.CANCELLED)
                self._end(live, FinishReason.CANCELLED, now_s)

    def on_gap(self, gap_s: float, tokens: int) -> None:
        self._metrics.gaps.observe(gap_s / tokens, tokens)

    def on_settled(self, live: Live, ended: Ended) -> None:
        self.verdicts.keep(live.place.wire_id, ended)
        self._metrics.on_settled(ended)
        if sight := live.session.foresight:
            self._forecasts.on_settled(sight, ended)
            sight.teach(ended.line)

    # The scheduler's side

    def on_scheduler_lost(self) -> None:
        """Its stream has ended, and nothing said on it counts any more. Until it answers on the
        next, workers may still bring tokens for what was submitted before."""
        self.connected = False

    def on_event(self, event: scheduler_pb2.SchedulerEvent) -> None:
        now_s = time.monotonic()
        if event.WhichOneof("kind") == "fleet":
            self.fleet = read_fleet(event.fleet, now_s)
            if not self.connected:
                self._on_connected(now_s)
            return
        live = self._roster.get(event.request.request_id)
        if live is not None and event.request.HasField("forecast_update"):
            self._on_foretold(live, event.request.forecast_update, now_s)
        elif live is None and event.request.HasField("placed"):
            self._roster.disown(event.request.request_id)  # it has ended, unseen by its scheduler
        elif live is not None:
            adopted, live.place.announced = live.place.announced, False
            self._on_request_event(live, event.request, adopted, now_s)

    def _on_connected(self, now_s: float) -> None:
        """A new stream to the scheduler, which may know nothing: it is told of everything, and
        what goes on at a worker goes on."""
        self.connected = True
        waiting = self._roster.waiting()
        for live in self._roster.submitted():
            if not self._goes_on(live):
                self._resubmit(live, Cause.SCHEDULER, now_s)
            elif live.place.due is None:
                self._metrics.announcements.inc()
                self._roster.announce(live, now_s)
        for live in waiting:
            self._roster.submit(live, now_s)

    def _goes_on(self, live: Live) -> bool:
        """Whether its tokens come, or will, on the stream on which its prompt went out."""
        return live.place.prompted and live.place.address in self._streams

    def _on_request_event(
        self, live: Live, event: scheduler_pb2.RequestEvent, adopted: bool, now_s: float
    ) -> None:
        match event.WhichOneof("kind"):
            case "placed":
                self._on_placed(live, event.placed, adopted, now_s)
            case "preempted":
                live.session.line.on_preempted()
                live.place.running = False
            case "resumed":
                if not live.place.running:
                    live.session.line.on_resumed(event.resumed.held_tokens > 0, now_s)
                live.place.running = True
            case "rejected":
                live.session.line.rejected = True
                drain_s = self.fleet.drain_left_s(now_s)
                refusal = messages.rejection(event.rejected, drain_s)
                self._end(live, FinishReason.ERROR, now_s, refusal)
            case "finished":
                self._on_finished(live, event.finished, now_s)

    def _on_foretold(self, live: Live, message: scheduler_pb2.ForecastUpdate, now_s: float) -> None:
        """It says nothing of where it stands. Who has been told nothing yet has news."""
        if sight := live.session.foresight:
            sight.hear(messages.foretold(message))
            if sight.is_news:
                live.call.notify(live.session, now_s)

    def _on_placed(
        self, live: Live, placed: scheduler_pb2.Placed, adopted: bool, now_s: float
    ) -> None:
        place, address = live.place, placed.worker_address
        stays = adopted and place.running and place.address == address and self._goes_on(live)
        place.worker_id, place.address, place.running = placed.worker_id, address, True
        live.session.line.placed_s = min(live.session.line.placed_s, now_s)
        if not stays:
            place.prompted = self._to_worker(address, self._prompt(live))

    def _on_finished(self, live: Live, finished: scheduler_pb2.Finished, now_s: float) -> None:
        reason = decode_reason(finished.reason) or FinishReason.ERROR
        if reason in (FinishReason.STOP, FinishReason.LENGTH):  # its tokens may be on their way
            live.place.due = Due(finished.output_tokens, reason)
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
        self._streams.add(address)
        for live in self._roster.at(address):
            if live.place.prompted:
                self._resubmit(live, Cause.WORKER, now_s)
        waiting = self._roster.at(address)
        for live in waiting:
            live.place.prompted = True
        return [self._prompt(live) for live in waiting]

    def on_worker_lost(self, address: str) -> None:
        """The stream has ended. Its sessions wait a moment: for the next, or for the scheduler,
        which may place them elsewhere first."""
        self._streams.discard(address)

    def on_tokens(self, address: str, batch: worker_pb2.TokenBatch) -> None:
        """One engine step's tokens. O(tokens): a dict lookup, a slice and a decode each."""
        self._heard.add(address)
        now_s = time.monotonic()
        total = 0
        for tokens in batch.requests:
            live = self._roster.get(tokens.request_id)
            if live is not None:
                total += self._feed(live, tokens, now_s)
        self._metrics.generation_tokens.inc(total)

    def _feed(self, live: Live, tokens: worker_pb2.RequestTokens, now_s: float) -> int:
        session = live.session
        had = len(session.output)
        reason = decode_reason(tokens.finish_reason) if tokens.finish_reason else None
        if reason is FinishReason.ERROR:
            if live.place.announced:
                self._roster.cancel(live, FinishReason.CANCELLED)
            message = tokens.message or "the worker failed; retry is safe"
            self._end(live, reason, now_s, ServiceError(Code.INTERNAL, message))
            return 0
        if not had:
            session.learn(tokens.cached_tokens, tokens.prompt_logprobs)
        news = session.feed(tokens.offset, tokens.token_ids, tokens.logprobs, reason, now_s)
        if news is News.GAP:
            self._resubmit(live, Cause.GAP, now_s)
        elif news is News.END:
            if live.place.announced or (session.stopped_by_text and reason is None):
                stopped = session.reason is FinishReason.STOP
                self._roster.cancel(live, FinishReason.STOP if stopped else FinishReason.CANCELLED)
            self._forget(live)
        if news is not News.NONE:
            live.call.notify(session, now_s)
        fresh = len(session.output) - had
        if fresh and live.call.whole and session.line.gap_s is not None:
            self.on_gap(session.line.gap_s, fresh)
        return fresh

    def _prompt(self, live: Live) -> worker_pb2.WorkerInput:
        session = live.session
        scored = bool(session.prompt_logprobs)
        wire_id, asked = live.place.wire_id, live.generation
        return messages.prompt(wire_id, asked, live.choice, session.output, scored)

    # Loss, and what ends it

    def _resubmit(self, live: Live, cause: Cause, now_s: float) -> None:
        """A part of it was lost: the one recovery path."""
        if cause is not Cause.SCHEDULER:
            self._roster.cancel(live, FinishReason.CANCELLED)
        if live.session.full:
            self._end(live, FinishReason.LENGTH, now_s)
            return
        if not self._may_repeat(live, cause, now_s):
            message = "too much is being done again already to start this once more; retry later"
            retry_s = max(messages.MIN_RETRY_S, self.fleet.drain_left_s(now_s))
            failure = ServiceError(Code.UNAVAILABLE, message, retry_s)
            self._end(live, FinishReason.ERROR, now_s, failure)
            return
        self._metrics.resubmissions.labels(cause.value).inc()
        live.session.line.on_preempted()
        self._roster.withdraw(live)
        if self.connected:
            self._roster.submit(live, now_s)

    def _may_repeat(self, live: Live, cause: Cause, now_s: float) -> bool:
        """What was seen to be lost is made good once, and once more after each new token; more
        than that has the budget to thank for it."""
        place = live.place
        unplaced = not place.address
        fresh = unplaced or place.attempts == 1 or len(live.session.output) > place.had_tokens
        return (cause.confirmed and fresh) or self._retries.take(now_s)

    def _end(
        self, live: Live, reason: FinishReason, now_s: float, failure: Exception | None = None
    ) -> None:
        live.session.end(reason, now_s, failure)
        self._forget(live)
        live.call.notify(live.session, now_s)

    def _forget(self, live: Live) -> None:
        self._roster.drop(live)
        if not self.live:
            self._idle.set()

    # Bounds on every wait

    def sweep(self, now_s: float, scheduler_lost_s: float) -> None:
        """What has waited too long: called a few times a second, O(live)."""
        turn_s = max(0.0, now_s - self._swept_s)
        heard, self._heard, self._swept_s = self._heard, set(), now_s
        for live in self._roster:
            if live.session.over:  # since this began, with another of its call
                continue
            if now_s > live.generation.deadline_s + DEADLINE_SLACK_S:
                self._roster.cancel(live, FinishReason.CANCELLED)
                self._end(live, FinishReason.DEADLINE, now_s)
            elif scheduler_lost_s > self._config.scheduler_wait_s:
                failure = ServiceError(Code.UNAVAILABLE, "the scheduler cannot be reached")
                self._end(live, FinishReason.ERROR, now_s, failure)
            elif live.place.due is not None:
                live.place.due.listen(turn_s, live.place.address in heard)
                self._settle(live, live.place.due, now_s)
            elif live.call.waits_for_client:
                self._mind_client(live.call, now_s)

    def _settle(self, live: Live, due: Due, now_s: float) -> None:
        """The scheduler says that it is finished, and its worker has not said so yet. While the
        stream lives its tokens are late, not lost: one that brings nothing at all does not live,
        and what is behind others' tokens for very long is not there."""
        if len(live.session.output) >= due.tokens:
            self._end(live, due.reason, now_s)
        elif due.quiet_s >= self._config.finish_wait_s or due.waited_s >= self._config.late_wait_s:
            self._resubmit(live, Cause.LATE, now_s)

    def _mind_client(self, call: ClientCall, now_s: float) -> None:
        if now_s - call.taken_s > self._config.client_stall_s:
            whose = {"request_id": call.request_id}
            stalled_s = now_s - call.taken_s
            log.info("a client took nothing for %g s and is let go", stalled_s, extra=whose)
            call.close()
            if call.owner is not None:
                call.owner.cancel()


def _unique(named: str) -> str:
    """An id of our own, which begins as its client calls the request: clients repeat themselves."""
    return f"{named}.{uuid4().hex[:16]}" if named else uuid4().hex
