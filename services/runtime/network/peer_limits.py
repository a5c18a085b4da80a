"""Bounds on the streams of peers, and on the wait for their hellos."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from google.protobuf.message import Message

from services.runtime.errors import Code, InvalidArgument, ServiceError

OpeningT = TypeVar("OpeningT", bound=Message)


class PeerLimits:
    """Counts the open streams of each kind of peer, also those that have not said hello yet."""

    def __init__(self, section: str, most: Mapping[str, int], hello_wait_s: float):
        """`most`: streams by the kind of peer, which `max_KINDs` of a section of the settings
        sets."""
        self._section, self._most, self._hello_wait_s = section, most, hello_wait_s
        self._open: Counter[str] = Counter()

    @contextmanager
    def stream(self, kind: str) -> Iterator[None]:
        """Counts a stream while the block runs. Raises ServiceError beyond the limit."""
        most = self._most[kind]
        if self._open[kind] >= most:
            sentence = f"{most} {kind}s are connected already: see {self._section}.max_{kind}s"
            raise ServiceError(Code.RESOURCE_EXHAUSTED, sentence)
        self._open[kind] += 1
        try:
            yield
        finally:
            self._open[kind] -= 1

    async def read_hello(self, messages: AsyncIterator[OpeningT]) -> OpeningT:
        """The first message of a stream. Raises ServiceError unless it is a hello, in time."""
        try:
            async with asyncio.timeout(self._hello_wait_s):
                first = await anext(aiter(messages), None)
        except TimeoutError:
            sentence = f"no hello came within {self._hello_wait_s:g} s"
            raise ServiceError(Code.DEADLINE_EXCEEDED, sentence) from None
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("hello", "the first message of a stream must be a hello")
        return first
