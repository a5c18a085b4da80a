"""Files and batches in a folder, which several gateway processes may share.

files/ID.json       the record of a file, written after its content
files/ID.data       its content
batches/ID/batch.json     written by the gateway that received the batch, then by the runner alone
batches/ID/cancel         exists once a client has cancelled the batch
batches/ID/output, errors lines so far; they become files when the batch ends
batches/ID/input          the lines of a batch of Messages, which has no files: answers stay here

Records are replaced atomically. All methods block; endpoints call them with `in_storage`.
"""

import asyncio
import fcntl
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, TypeVar

from gateway.faces.http.batches.records import BatchRecord, FileRecord, Purpose
from services.runtime.config import ConfigError
from services.runtime.errors import Code, ServiceError

log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S = 60.0  # of a client, once the folder cannot be written
ID_BYTES = 12
PART = ".part"  # of a file that is not written completely
PART_S = 3600.0  # after which nothing writes it any more
Record = TypeVar("Record", FileRecord, BatchRecord)
FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")


async def in_storage(work: Callable[..., T], *values: object) -> T:
    """The result of work on the folder, in a thread. Raises ServiceError if the folder cannot be
    read or written now."""
    try:
        return await asyncio.to_thread(work, *values)
    except OSError as error:
        log.warning("the folder of batches: %s", error)
        message = f"files and batches cannot be stored now: {error.strerror}; retry later"
        raise ServiceError(Code.UNAVAILABLE, message, RETRY_S) from None


class BatchStore:
    """Raises ConfigError if the folder cannot be written."""

    def __init__(self, folder: str):
        self._root = Path(folder).expanduser()
        self._files, self._batches = self._root / "files", self._root / "batches"
        try:
            for each in (self._files, self._batches):
                each.mkdir(parents=True, exist_ok=True)
            self._lock_file = (self._root / ".runner").open("ab")
        except OSError as error:
            raise ConfigError(
                f"gateway.batch_folder: cannot write to {folder}: {error.strerror}"
            ) from None

    # Files

    def add_file(self, content: BinaryIO, size: int, name: str, owner: str) -> FileRecord:
        """Copies an uploaded file."""
        record = FileRecord(
            f"file-{token_hex(ID_BYTES)}", owner, size, int(time.time()), name, Purpose.INPUT
        )
        path = self.content_path(record.id)
        with _replacing(path, "wb") as file:
            shutil.copyfileobj(content, file)
        self._write(self._files / f"{record.id}.json", record.stored())
        return record

    def adopt_file(self, path: Path, record: FileRecord) -> None:
        """Moves a finished file of a batch here; does nothing if it is here already."""
        if path.exists():
            path.rename(self.content_path(record.id))
        if not (self._files / f"{record.id}.json").exists():
            size = self.content_path(record.id).stat().st_size
            self._write(self._files / f"{record.id}.json", {**record.stored(), "bytes": size})

    def find_file(self, file_id: str) -> FileRecord | None:
        if not FILE_ID.fullmatch(file_id):
            return None
        return _load(self._files / f"{file_id}.json", FileRecord.load)

    def list_files(self) -> list[FileRecord]:
        """The newest first. O(files)."""
        found = (self.find_file(path.stem) for path in self._files.glob("*.json"))
        return sorted((each for each in found if each), key=_newest_first)

    def count_files(self) -> int:
        return sum(1 for _ in self._files.glob("*.json"))

    def remove_file(self, file_id: str) -> None:
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self.content_path(file_id).unlink(missing_ok=True)

    def content_path(self, file_id: str) -> Path:
        return self._files / f"{file_id}.data"

    # Batches

    def save(self, batch: BatchRecord) -> None:
        self.batch_path(batch.id).mkdir(exist_ok=True)
        self._write(self.batch_path(batch.id) / "batch.json", batch.stored())

    def add_batch_of_messages(self, batch: BatchRecord, lines: Iterable[bytes]) -> None:
        """Stores a batch with its lines."""
        self.batch_path(batch.id).mkdir()
        with _replacing(self.input_path(batch), "wb") as file:
            file.writelines(lines)
        self.save(batch)

    def input_path(self, batch: BatchRecord) -> Path:
        if batch.is_of_messages:
            return self.batch_path(batch.id) / "input"
        return self.content_path(batch.input_file_id)

    def find_batch(self, batch_id: str) -> BatchRecord | None:
        if not BATCH_ID.fullmatch(batch_id):
            return None
        return _load(self.batch_path(batch_id) / "batch.json", BatchRecord.load)

    def list_batches(self) -> list[BatchRecord]:
        """The newest first. O(batches)."""
        found = (self.find_batch(path.name) for path in self._batches.iterdir())
        return sorted((each for each in found if each), key=_newest_first)

    def remove_batch(self, batch_id: str) -> None:
        shutil.rmtree(self.batch_path(batch_id), ignore_errors=True)

    def batch_path(self, batch_id: str) -> Path:
        return self._batches / batch_id

    def cancel(self, batch_id: str) -> None:
        (self.batch_path(batch_id) / "cancel").touch()

    def cancelled_at(self, batch_id: str) -> float | None:
        """When a client has cancelled the batch, Unix time."""
        with suppress(FileNotFoundError):
            return (self.batch_path(batch_id) / "cancel").stat().st_mtime
        return None

    def is_cancelled(self, batch_id: str) -> bool:
        return self.cancelled_at(batch_id) is not None

    # The process that runs the batches

    @contextmanager
    def runner_lock(self) -> Iterator[bool]:
        """Whether this process runs the batches, in the block. The lock ends with the process."""
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def remove_parts(self) -> None:
        """Removes what processes have left that were killed while they wrote."""
        oldest_s = time.time() - PART_S
        with suppress(OSError):
            for path in self._root.rglob(f"*{PART}"):
                if path.stat().st_mtime < oldest_s:
                    path.unlink()
            for folder in filter(
                lambda each: BATCH_ID.fullmatch(each.name), self._batches.iterdir()
            ):
                if not (folder / "batch.json").exists() and folder.stat().st_mtime < oldest_s:
                    self.remove_batch(folder.name)

    def _write(self, path: Path, fields: Mapping[str, Any]) -> None:
        with _replacing(path, "w") as file:
            json.dump(fields, file)


@contextmanager
def _replacing(path: Path, mode: str) -> Iterator[Any]:
    """A file that takes the place of another at the end of the block; nothing is left of it if the
    block fails."""
    part = path.with_suffix(f".{token_hex(4)}{PART}")
    try:
        with part.open(mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _load(path: Path, load: Callable[[Mapping[str, Any]], Record]) -> Record | None:
    """None for a record that was deleted meanwhile, or that is not one of this version."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        return load(json.loads(path.read_text()))
    return None


def _newest_first(record: FileRecord | BatchRecord) -> tuple[int, str]:
    return (-record.created_at, record.id)
