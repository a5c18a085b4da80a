"""Computes embeddings in a process of its own, which starts with the first request."""

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.embeddings.frames import HEAD, encode_frame
from gateway.types.errors import MIN_RETRY_S
from services.runtime.errors import Code, InvalidArgument, ServiceError

MODULE = "gateway.embeddings.process"
ENDED = "the encoder of embeddings ended unexpectedly; retry later"
SLOW = "embeddings take longer than gateway.embedding_wait_s, {limit_s:g} s; send fewer texts"
TYPICAL_S = 0.1  # of one request, to compute a refused one's retry time


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """`max_waiting` requests, those being computed included; more are refused. A request that is
    not answered within `wait_s` fails."""

    max_waiting: int
    wait_s: float
    threads: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """`json`: a list, as `gateway.embeddings.process` describes it."""

    json: bytes
    tokens: int
    dimensions: int


class TextEncoder:
    """Answers one request after another. Used from one event loop; `close` ends the process."""

    def __init__(self, name: str, limits: EncoderLimits):
        self.name = name
        self._limits = limits
        self._waiting = 0
        self._turn = asyncio.Lock()
        self._process: Process | None = None

    async def encode(
        self, kind: str, texts: Sequence[str], field: str, cut: bool = False
    ) -> Encoded:
        """`cut`: only the beginning of a long text is read; without, it is a fault of `field`.
        Raises InvalidArgument or another ServiceError."""
        if self._waiting >= self._limits.max_waiting:
            message = f"{self._waiting} requests for embeddings wait; retry later"
            retry_s = max(MIN_RETRY_S, self._waiting * TYPICAL_S)
            raise ServiceError(Code.RESOURCE_EXHAUSTED, message, retry_s)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._limits.wait_s), self._turn:
                payload = await asyncio.to_thread(lambda: json.dumps(texts).encode())
                header, answer = await self._ask({"kind": kind, "cut": cut}, payload)
        except TimeoutError:
            message = SLOW.format(limit_s=self._limits.wait_s)
            raise ServiceError(Code.UNAVAILABLE, message, MIN_RETRY_S) from None
        finally:
            self._waiting -= 1
        if "long" in header:
            where = f"{field}[{header['long']}]" if len(texts) > 1 else field
            raise InvalidArgument(where, f"at most {header['most']} tokens; shorten the text")
        return Encoded(answer, header["tokens"], header["dimensions"])

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _ask(self, header: Mapping[str, Any], payload: bytes) -> tuple[Any, bytes]:
        """One question and its answer. A process that has not answered completely is ended, so
        that the next question does not receive the rest."""
        try:
            process = self._process or await self._start()
            assert process.stdin is not None
            process.stdin.write(encode_frame(header, payload))
            await process.stdin.drain()
            return await _receive(process)
        except (OSError, asyncio.IncompleteReadError):
            await self.close()
            raise ServiceError(Code.UNAVAILABLE, ENDED, MIN_RETRY_S) from None
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> Process:
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE, self.name, str(self._limits.threads)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends the child
        )
        header, _ = await _receive(process)
        if "fault" in header:
            raise ServiceError(Code.UNAVAILABLE, header["fault"])
        return process


async def _receive(process: Process) -> tuple[Any, bytes]:
    assert process.stdout is not None
    header_bytes, payload_bytes = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
    header = json.loads(await process.stdout.readexactly(header_bytes))
    return header, await process.stdout.readexactly(payload_bytes)
