"""The lines of one batch: what its input has, and what is answered already. Blocking."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gateway.faces.http.batches.records import LineError
from gateway.faces.http.offline.lines import Line, read_custom_id, read_line
from services.runtime.errors import InvalidArgument

MAX_ERRORS = 100  # that a failed batch lists
CUT_BYTES = 2**16


@dataclass(frozen=True)
class InputLimits:
    lines: int
    line_bytes: int


def check_input(path: Path, endpoint: str, limits: InputLimits) -> tuple[int, list[LineError]]:
    """The number of lines, and what is wrong with them; nothing else of the batch runs then."""
    seen: set[str] = set()
    errors: list[LineError] = []
    count = 0
    for number, text in _numbered_lines(path, limits.line_bytes):
        count += 1
        if count > limits.lines:
            message = f"at most {limits.lines} lines; split the file"
            return count, [LineError("too_many_lines", message, number)]
        try:
            if len(text) > limits.line_bytes:
                raise InvalidArgument("", f"the line exceeds {limits.line_bytes} bytes")
            line = read_line(text)
            if line.url != endpoint:
                raise InvalidArgument("url", f"is {line.url}, and the batch is for {endpoint}")
            if line.custom_id in seen:
                raise InvalidArgument("custom_id", f"{line.custom_id!r} occurs twice")
            seen.add(line.custom_id)
        except InvalidArgument as fault:
            errors.append(LineError("invalid_line", fault.message, number, fault.field or None))
            if len(errors) >= MAX_ERRORS:
                break
    if not count:
        errors.append(LineError("empty_file", "the file has no lines"))
    return count, errors


def read_lines(path: Path, limits: InputLimits) -> Iterator[Line]:
    """The lines of an input that `check_input` has accepted."""
    for _, text in _numbered_lines(path, limits.line_bytes):
        yield read_line(text)


class AnswerLines:
    """A growing file of answers. What a crash has torn is removed, and what follows it."""

    def __init__(self, path: Path):
        self.answered: set[str] = set()
        self._file: BinaryIO = path.open("a+b")
        self._file.seek(0)
        whole_bytes = 0
        for line in self._file:
            custom_id = _read_whole(line)
            if custom_id is None:
                break
            self.answered.add(custom_id)
            whole_bytes += len(line)
        self._file.truncate(whole_bytes)

    def add(self, custom_id: str, line: bytes) -> None:
        self.answered.add(custom_id)
        self._file.write(line)
        self._file.flush()  # a crash of the process loses at most the line that it writes

    def close(self) -> None:
        """The lines survive a crash of the machine."""
        try:
            os.fsync(self._file.fileno())
        finally:
            self._file.close()


def close_all(*files: AnswerLines) -> None:
    """Closes each, also if that of another fails."""
    with ExitStack() as stack:
        for file in files:
            stack.callback(file.close)


def _read_whole(line: bytes) -> str | None:
    """The id of a line of answers; None for one that is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        return read_custom_id(line)
    except ValueError:
        return None


def _numbered_lines(path: Path, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers. A longer line is cut behind `most_bytes`."""
    with path.open("rb") as file:
        number = 0
        while text := file.readline(most_bytes + 2):
            number += 1
            rest = text
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(CUT_BYTES)
            if text.strip():
                yield number, text.rstrip(b"\r\n")
