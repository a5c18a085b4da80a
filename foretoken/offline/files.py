"""The files of `foretoken generate`: requests are read from one, answers are added to the other.

Answers have the `custom_id` of their line, or `line-N` with its number, and are in the order in
which they ended. A job that runs again adds only what is missing.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import uuid4

from foretoken.offline.job import OfflineRequest
from gateway.faces.http.offline.lines import (
    encode_answer,
    encode_fault,
    read_custom_id,
    read_line,
)
from services.runtime.errors import InvalidArgument, ServiceError

MAX_LINE_BYTES = 8 * 2**20  # as gateway.max_body_bytes
OnFault = Callable[[OfflineRequest, ServiceError], None]


class AnswerFile:
    """The answers of a job, in a file that only grows; a context manager. Raises ValueError for a
    file that has other lines, which stays as it is."""

    def __init__(self, path: Path):
        self._path = path
        self.answered: set[str] = set()
        if path.exists():
            os.truncate(path, self._read_whole_lines())

    def __enter__(self) -> Self:
        self._file = self._path.open("ab")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def add_answer(self, request: OfflineRequest, body: dict[str, object]) -> None:
        self._add(encode_answer(*_ids(request), body))

    def add_fault(self, request: OfflineRequest, error: ServiceError) -> None:
        self._add(encode_fault(*_ids(request), error, request.url))

    def _read_whole_lines(self) -> int:
        """Adds the ids of the answers. Returns the bytes before a line that a killed job has not
        written to its end."""
        whole_bytes = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.startswith(b"{") and not line.endswith(b"\n"):
                    break
                try:
                    self.answered.add(read_custom_id(line))
                except ValueError:
                    raise ValueError(
                        f"--out: line {number} of {self._path} is no answer; name a new file"
                    ) from None
                whole_bytes += len(line)
        return whole_bytes

    def _add(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()  # a killed job loses at most the line that it writes


def read_requests(path: Path, answered: set[str], on_fault: OnFault) -> Iterator[OfflineRequest]:
    """The requests of a file that are not answered yet; `on_fault` receives the bad lines."""
    seen: set[str] = set()
    with path.open("rb") as file:
        number = 0
        while text := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if not text.strip():
                continue
            known = OfflineRequest(f"line-{number}", f"line {number}", "", {})
            try:
                if len(text) > MAX_LINE_BYTES:
                    _skip_line(file.readline)
                    raise InvalidArgument("", f"the line exceeds {MAX_LINE_BYTES} bytes")
                line = read_line(text, known.id)
                if line.custom_id in seen:
                    raise InvalidArgument("custom_id", f"{line.custom_id!r} occurs twice")
            except InvalidArgument as fault:
                if known.id not in answered:
                    on_fault(known, fault)
                continue
            seen.add(line.custom_id)
            if line.custom_id not in answered:
                yield OfflineRequest(line.custom_id, known.name, line.url, line.body)


def count_lines(path: Path) -> int:
    """Lines that are not blank. O(bytes)."""
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _ids(request: OfflineRequest) -> tuple[str, str, str]:
    return f"batch_req_{uuid4().hex}", request.id, uuid4().hex


def _skip_line(read: Callable[[int], bytes]) -> None:
    while (part := read(2**20)) and not part.endswith(b"\n"):
        pass
