"""Files and batches in a folder, which several gateway processes may share.

files/ID.json       the record of a file, written after its content
files/ID.data       its content
batches/ID/batch.json     written by the gateway that received the batch, then by the runner alone
batches/ID/cancel         exists once a client has cancelled the batch
batches/ID/output, errors lines so far; they become files when the batch ends

Records are replaced atomically. All methods block; endpoints call them in threads.
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from gateway.faces.http.batches.records import BatchRecord, FileRecord, Purpose
from services.runtime.config import ConfigError

ID_BYTES = 12
FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")


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
        with path.with_suffix(".part").open("wb") as file:
            shutil.copyfileobj(content, file)
            os.fsync(file.fileno())
        path.with_suffix(".part").rename(path)
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
        fields = _read(self._files / f"{file_id}.json")
        return None if fields is None else FileRecord.load(fields)

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

    def find_batch(self, batch_id: str) -> BatchRecord | None:
        if not BATCH_ID.fullmatch(batch_id):
            return None
        fields = _read(self.batch_path(batch_id) / "batch.json")
        return None if fields is None else BatchRecord.load(fields)

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

    def is_cancelled(self, batch_id: str) -> bool:
        return (self.batch_path(batch_id) / "cancel").exists()

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

    def _write(self, path: Path, fields: Mapping[str, Any]) -> None:
        part = path.with_suffix(f".{token_hex(4)}.part")
        with part.open("w") as file:
            json.dump(fields, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):  # deleted meanwhile, or foreign
        fields = json.loads(path.read_text())
        return fields if isinstance(fields, dict) else None
    return None


def _newest_first(record: FileRecord | BatchRecord) -> tuple[int, str]:
    return (-record.created_at, record.id)
