"""BackendCalls: the requests that run at a server, one task each."""

import asyncio
import logging
import time
from collections.abc import Sequence as Seq
from contextlib import aclosing
from typing import Protocol

from tokenizers import Tokenizer

from services.runtime.network.backoff import Backoff
from services.worker.backend.answer import BackendAnswer, Replay
from services.worker.backend.client import BackendClient, Busy, Denied, Lost, Refused
from services.worker.backend.constraints import find_restart
from services.worker.backend.dialect import encode_request, find_refusal
from services.worker.backend.discovery import Backend
from services.worker.backend.requests import Arrival
from services.worker.requests.types.sequence import Sequence

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1  # after a failure; doubled by each further one
REST_S = 1.0  # for what follows an answer


class Outcomes(Protocol):
    """What becomes of a request at the server."""

    def on_sent(self, request_id: str, context_tokens: int) -> None: ...

    def on_arrivals(self, request_id: str, arrivals: Seq[Arrival]) -> None: ...

    def on_refused(self, request_id: str, why: str) -> None:
        """The server will never answer it."""

    def on_busy(self, request_id: str, why: str) -> None:
        """The server has no capacity for it."""

    def on_lost(self, request_id: str, why: str) -> None:
        """The server failed, or broke off."""


class BackendCalls:
    """Calls of one server. After a refusal for lack of capacity, or a loss, none begins for a
    while: the server is not flooded, and one that has gone is noticed meanwhile."""

    def __init__(
        self,
        client: BackendClient,
        backend: Backend,
        tokenizer: Tokenizer,
        eos_id: int,
        longest_pause_s: float,
        tasks: asyncio.TaskGroup,
        outcomes: Outcomes,
    ):
        self._client, self._backend = client, backend
        self._tokenizer, self._eos_id = tokenizer, eos_id
        self._pauses = Backoff(FIRST_PAUSE_S, longest_pause_s)
        self._failures = 0  # in a row
        self._resume_s = 0.0
        self._tasks, self._outcomes = tasks, outcomes
        self._calls: dict[str, asyncio.Task[None]] = {}

    def begin(self, sequence: Sequence) -> None:
        """Sends a request with the tokens that it has so far."""
        request_id = sequence.request_id
        self.cut(request_id)
        call = self._tasks.create_task(self._run(sequence, list(sequence.tokens)))
        self._calls[request_id] = call

    def cut(self, request_id: str) -> None:
        """Ends a request at the server; ignores an unknown one."""
        if call := self._calls.pop(request_id, None):
            call.cancel()

    def cut_all(self) -> None:
        for request_id in list(self._calls):
            self.cut(request_id)

    async def _run(self, sequence: Sequence, tokens: list[int]) -> None:
        request_id, outcomes = sequence.request_id, self._outcomes
        try:
            await self._until_resumed()
            await self._send(sequence, tokens)
        except Refused as error:
            outcomes.on_refused(request_id, str(error))
        except Busy as error:
            self._back_off(error.retry_s)
            outcomes.on_busy(request_id, str(error))
        except TimeoutError:
            pass  # the answer had ended
        except (Lost, Denied) as error:
            if self._is_mine(request_id):
                self._back_off()
                outcomes.on_lost(request_id, str(error))
        except Exception as error:  # whatever a server sends concerns its request alone
            log.exception("an answer of the backend cannot be read")
            if self._is_mine(request_id):
                self._back_off()
                outcomes.on_lost(request_id, f"the backend's answer cannot be read: {error!r}")
        finally:
            if self._is_mine(request_id):
                del self._calls[request_id]

    async def _send(self, sequence: Sequence, tokens: list[int]) -> None:
        backend, prompt = self._backend, sequence.prompt
        if why := find_refusal(prompt, backend.dialect):
            raise Refused(why)
        known: list[int] = []
        if sequence.constrained:  # begins anew: a grammar allows its beginning first
            end = backend.dialect.reasoning_end
            restart = find_restart(tokens, prompt.prompt_tokens, prompt.sampling, end)
            tokens, known = tokens[:restart], tokens[restart:]
        body = encode_request(prompt, tokens, backend.dialect, backend.model, self._decode)
        answer = BackendAnswer(backend.dialect, self._tokenizer, self._eos_id)
        replay = Replay(known)
        self._outcomes.on_sent(sequence.request_id, len(tokens))
        async with asyncio.timeout(None) as limit, aclosing(self._client.events(body)) as pieces:
            async for events in pieces:
                arrivals, broken = answer.read_all(events)
                if answer.ended and self._is_mine(sequence.request_id):
                    # Reads the rest alone: a connection is used again once it has been read.
                    del self._calls[sequence.request_id]
                    limit.reschedule(asyncio.get_running_loop().time() + REST_S)
                try:
                    arrivals = replay.skip(arrivals)
                except ValueError as error:
                    raise Refused(str(error)) from None
                if arrivals:
                    self._failures = 0
                    self._outcomes.on_arrivals(sequence.request_id, arrivals)
                if broken:
                    raise Lost(broken)
        if not answer.ended:
            raise Lost("the backend closed the stream before the answer ended")

    def _is_mine(self, request_id: str) -> bool:
        """Whether the running task is the request's call."""
        return self._calls.get(request_id) is asyncio.current_task()

    def _back_off(self, retry_s: float = 0.0) -> None:
        """Lets no call begin for a while, twice as long as after the last failure. Calls that were
        sent together and fail together count once."""
        now = time.monotonic()
        pause_s = retry_s
        if now >= self._resume_s:
            pause_s = max(retry_s, self._pauses.after_s(self._failures))
            self._failures += 1
        self._resume_s = max(self._resume_s, now + pause_s)

    async def _until_resumed(self) -> None:
        left_s = self._resume_s - time.monotonic()
        while left_s > 0:  # it may have been refused again meanwhile
            await asyncio.sleep(left_s)
            left_s = self._resume_s - time.monotonic()

    def _decode(self, ids: Seq[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
