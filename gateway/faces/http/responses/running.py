"""Responses that run in the background, whether or not a client reads their events."""

import asyncio
import logging
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from gateway.background import BackgroundTasks
from gateway.config import GatewayConfig
from gateway.faces.http.errors import internal_error
from gateway.faces.http.generate import OpenAnswer
from gateway.faces.http.responses.body import ResponsesBody
from gateway.faces.http.responses.event_copies import EventCopies
from gateway.faces.http.responses.event_log import EventLog, EventLogs
from gateway.faces.http.responses.store import Entry, ResponseStore, StoredResponse
from gateway.faces.http.responses.writer import ResponseWriter, with_error, with_status
from services.core import FinishReason
from services.runtime.errors import InvalidArgument, ServiceError
from services.runtime.tasks import run_to_completion

log = logging.getLogger(__name__)

WATCH_S = 0.2  # between two looks for cancellations by other processes, and two writes for them
CANCEL_LOOKS = 50  # whether another process has ended a cancelled response: 10 s
NO_EVENTS = (
    "no events of it are kept: only those of the last responses that were created with background "
    "and stream are; leave stream out"
)


class RunningResponses:
    """Starts responses of this process and stores how they end; follows and ends responses, also of
    other processes that share the store."""

    def __init__(self, config: GatewayConfig, tasks: BackgroundTasks, store: ResponseStore):
        self._tasks, self._store = tasks, store
        self._logs = EventLogs(
            config.max_background, config.max_response_events, config.max_response_event_bytes
        )
        self._copies: EventCopies | None = None
        self._sharing = asyncio.Lock()  # writes in the order of their events
        self._failure_logged = False
        if store.shared:
            self._copies = EventCopies(config.responses_file, config.gateway_id)
            tasks.companion = self._watch

    async def start(self, answer: OpenAnswer[ResponsesBody], owner: str) -> Entry:
        """Runs an answer; returns the response as of now. Raises ServiceError if as many run as
        may."""
        writer = _writer_of(answer)
        response_id, running = writer.response_id, with_status(writer.described, "in_progress")
        self._tasks.check_room()
        stored = StoredResponse(response_id, owner, running, answer.body.inputs, running=True)
        await asyncio.to_thread(self._store.keep, stored)
        events: EventLog | None = None
        if answer.body.stream:
            events = self._logs.open(response_id)
            events.add(writer.encode_queued())
        try:
            await self._share()  # before the client knows the id
            self._tasks.start(response_id, partial(self._run, answer, owner, events))
        except (ServiceError, asyncio.CancelledError):
            self._logs.drop(response_id)
            await asyncio.to_thread(self._store.delete, response_id, owner)
            raise
        return with_status(writer.described, "queued")

    def follow(self, response_id: str, after: int | None = None) -> AsyncGenerator[bytes]:
        """The events that follow the one of a number, as they come; None: those that are kept.
        Raises InvalidArgument if the next one is not kept."""
        events = self._logs.find(response_id)
        if events is None:
            copied = self._copies.follow(response_id, after) if self._copies else None
            if copied is None:
                raise InvalidArgument("stream", NO_EVENTS)
            return copied
        begin = events.first - 1 if after is None else after
        events.check(begin)
        return events.read(begin)

    async def cancel(self, response_id: str) -> None:
        """Ends a response, and waits for its end; for CANCEL_LOOKS at most if another process runs
        it."""
        if await self._tasks.cancel(response_id):
            return
        await asyncio.to_thread(self._store.cancel, response_id)
        for _ in range(CANCEL_LOOKS):
            if not self._store.runs(response_id):
                return
            await asyncio.sleep(WATCH_S)

    async def delete(self, response_id: str) -> None:
        """Ends a response, and drops its events."""
        await self._tasks.cancel(response_id)
        self._logs.drop(response_id)
        if self._copies is not None:
            async with self._sharing:
                await asyncio.to_thread(self._copies.drop, response_id)

    async def _watch(self) -> None:
        """Ends the responses that other processes cancel or delete, and writes the events of all
        for them, while there are some."""
        while True:
            await asyncio.sleep(WATCH_S)
            names = self._tasks.names
            for name in names - self._store.wanted():
                await self._tasks.cancel(name)
            shared = await self._share()
            if not (names or shared or self._tasks.names):
                return

    async def _share(self) -> bool:
        """Writes new events for the other processes; the next call tries again what fails. Whether
        there were any."""
        if self._copies is None:
            return False
        async with self._sharing:
            news = self._logs.pop_news()
            if news:
                try:
                    kept = frozenset(self._logs.names)
                    await asyncio.to_thread(self._copies.write, news, kept)
                    self._failure_logged = False
                except sqlite3.Error:
                    self._logs.put_back(news)
                    if not self._failure_logged:
                        log.exception("events for the other gateway processes wait to be written")
                    self._failure_logged = True
            return bool(news)

    async def _run(
        self, answer: OpenAnswer[ResponsesBody], owner: str, events: EventLog | None
    ) -> None:
        writer = _writer_of(answer)
        response = with_status(writer.described, "cancelled")
        try:
            with answer.ends_on_error():
                generating = answer.collect() if events is None else _stream(answer, events)
                response = await generating
                answer.call.on_whole_sent()
            answer.end()
        except ServiceError as error:
            response = with_error(writer.described, error)
        except Exception:
            log.exception("a background response failed")
            response = with_error(writer.described, internal_error())
        finally:
            ended = StoredResponse(writer.response_id, owner, response, answer.body.inputs)
            try:
                await run_to_completion(asyncio.to_thread(self._store.finish, ended))
            finally:
                if events is not None:
                    events.add([writer.encode_end(response)])
                    events.end()


async def _stream(answer: OpenAnswer[ResponsesBody], events: EventLog) -> Entry:
    """The ended response, after all events but the last. Raises ServiceError."""
    writer, reason = _writer_of(answer), FinishReason.ERROR
    async with aclosing(answer.call.chunks()) as chunks:
        async for chunk in chunks:
            events.add(writer.encode_steps(chunk))
            answer.trace.on_chunk_sent()
            reason = chunk.reason or reason
    return await answer.encode(partial(writer.render_end, reason, streamed=True))


def _writer_of(answer: OpenAnswer[ResponsesBody]) -> ResponseWriter:
    assert isinstance(answer.writer, ResponseWriter)
    return answer.writer
