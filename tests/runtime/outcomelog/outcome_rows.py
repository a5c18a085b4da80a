"""Numbered rows, and journals that poll often, for tests of the outcome log."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.runtime.outcomelog import Entry, Journal, OutcomeLog, Row, open_log


def row(number: int, kind: str = "done", version: int = 1) -> Row:
    return Row(kind, version, str(number).encode())


def rows(*numbers: int) -> list[Row]:
    return [row(number) for number in numbers]


def numbers(found: Sequence[Entry | Row]) -> list[int]:
    plain = [each.row if isinstance(each, Entry) else each for each in found]
    return [int(each.payload) for each in plain]


@asynccontextmanager
async def journaling(
    log: OutcomeLog, got: list[Row], version_max: int = 1, **bounds: Any
) -> AsyncIterator[Journal]:
    """A running journal that polls often; cancelled at the end of the block."""
    journal = Journal(log, got.extend, {"done": version_max}, **{"poll_s": 0.01, **bounds})
    task = asyncio.create_task(journal.run())
    try:
        yield journal
    finally:
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@asynccontextmanager
async def opened(path: Path | str, rows_max: int = 1_000) -> AsyncIterator[OutcomeLog]:
    log = open_log(str(path), rows_max)
    try:
        yield log
    finally:
        await log.close()


async def kept(path: Path) -> list[int]:
    async with opened(path) as log:
        return numbers(await log.read("", 10_000))
