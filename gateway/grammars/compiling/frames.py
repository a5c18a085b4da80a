"""Messages of the compiler process: four bytes of length, then a JSON object."""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

HEAD = struct.Struct(">I")
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message: the model, and the limits of each job."""

    tokenizer: str  # JSON, as in tokenizer.json
    vocabulary_tokens: int
    eos_ids: list[int]
    slow_s: float  # a job that takes longer is slow
    limit_s: float  # a job that takes more processor time is killed
    memory_bytes: int  # of one job, in addition to the process it is forked from


def encode_frame(message: Message) -> bytes:
    body = json.dumps(message).encode()
    return HEAD.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages. O(bytes)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that `data` completes."""
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            end = HEAD.size + HEAD.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEAD.size : end])
            del self._buffer[:end]
            yield json.loads(body)
