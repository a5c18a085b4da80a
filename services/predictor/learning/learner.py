"""What the log delivers becomes what the predictor knows: alike on every replica of one log."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from services.predictor.interface import Example
from services.predictor.learning.records import EncodedBy, Record, decode, without_features
from services.predictor.learning.rules import Rule
from services.runtime.outcomelog import Row

log = logging.getLogger(__name__)


STUDY_S = 1.0  # between two looks at what is to be studied; a model is fitted to thousands anyway
SLICE = 16  # examples studied in one go, a few tens of milliseconds with six members
# Examples that wait to be studied, 10 kB each. What comes on top, as when a long log is replayed,
# is studied at once, so that reading waits for it.
BACKLOG_MAX = 1_024


class Learns(Protocol):
    """Of a foreteller, what learning needs."""

    def learn(self, examples: Sequence[Example]) -> int:
        """What takes microseconds: lengths. How many were learnt."""
        ...

    def study(self, examples: Sequence[Example]) -> None:
        """What takes milliseconds: prompts and their lengths."""
        ...


class Learning:
    """Takes rows as the journal delivers them, its own among them.

    Lengths are learnt at once. Prompts are studied by and by in `run`, half of the time at most, so
    that forecasts come between.

    rule: which prompts are trained on; of the others the length alone is learnt. by: whose
    features are read, None where no prompts are. writer: marks the rows of this process.
    learnt: told how many outcomes were learnt and how many passed over.
    """

    def __init__(
        self,
        foreteller: Learns,
        rule: Rule,
        by: EncodedBy | None,
        writer: str,
        learnt: Callable[[int, int], None],
    ):
        self.examples = 0  # studied with features
        self.unreadable = 0  # rows
        self.unstudied = 0  # the model failed on them
        self.own = 0  # rows of this process that came back
        self._foreteller = foreteller
        self._rule = rule
        self._by = by
        self._writer = writer
        self._learnt = learnt
        self._backlog: deque[Example] = deque()
        self._came = asyncio.Event()
        self._studied = asyncio.Event()

    def deliver(self, rows: Sequence[Row]) -> None:
        records = [record for row in rows if (record := self._read(row))]
        self.own += sum(record.writer == self._writer for record in records)
        examples = [self._ruled(record) for record in records]
        learnt = self._foreteller.learn(examples)
        self._learnt(learnt, len(rows) - learnt)
        self._came.set()
        self._backlog.extend(examples)
        self._studied.clear()
        while len(self._backlog) > BACKLOG_MAX:
            self._study()

    async def run(self) -> None:
        """Study what waits, until cancelled."""
        while True:
            while self._backlog:
                began_s = time.monotonic()
                self._study()
                await asyncio.sleep(time.monotonic() - began_s)
            self._studied.set()
            await asyncio.sleep(STUDY_S)

    async def has_come(self, own: int, limit_s: float) -> None:
        """Return when so many of our rows have come back, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.own < own:
                    self._came.clear()
                    await self._came.wait()

    async def has_studied(self) -> None:
        """Return when nothing waits to be studied."""
        await self._studied.wait()

    def _study(self) -> None:
        some = [self._backlog.popleft() for _ in range(min(SLICE, len(self._backlog)))]
        try:
            self._foreteller.study(some)
        except Exception:
            if not self.unstudied:
                log.exception("the model could not learn from outcomes; this is said once")
            self.unstudied += len(some)
        else:
            self.examples += sum(e.query.features is not None for e in some)

    def _read(self, row: Row) -> Record | None:
        try:
            return decode(row, self._by)
        except ValueError as error:
            if not self.unreadable:
                log.warning(
                    "the log holds rows that are no outcomes (%s): they are passed over", error
                )
            self.unreadable += 1
            return None

    def _ruled(self, record: Record) -> Example:
        example = record.example
        if example.query.features is None or self._rule(
            record.foretold_mean, example.output_tokens
        ):
            return example
        return without_features(example)
