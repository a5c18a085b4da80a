"""What the log delivers becomes what the predictor knows: alike on every replica of one log."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from services.predictor.interface import Example
from services.predictor.learning.records import KIND, EncodedBy, Record, decode, without_features
from services.predictor.learning.rules import Rule
from services.predictor.serving.executor import Desk, Do
from services.runtime.outcomelog import Row

log = logging.getLogger(__name__)


STUDY_S = 1.0  # between two looks at what is to be studied; a model is fitted to thousands anyway
SLICE = 16  # examples studied in one go, a few tens of milliseconds with six members


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

    Lengths are learnt at once. Prompts are studied by and by in `run`, at the desk and out of its
    budget. Of those that wait, the oldest go for new ones.

    rule: which prompts are trained on; of the others the length alone is learnt. by: whose
    features are read, None where no prompts are. writer: marks the rows of this process.
    backlog_max: examples that wait, 10 kB each; no fewer than models are fitted to, so that none
    is lost of a long log that is replayed. learnt: told how many outcomes were learnt and how many
    passed over.
    """

    def __init__(
        self,
        foreteller: Learns,
        rule: Rule,
        by: EncodedBy | None,
        writer: str,
        backlog_max: int,
        desk: Desk,
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
        self._desk = desk
        self._backlog: deque[Example] = deque(maxlen=backlog_max)
        self._came = asyncio.Event()
        self._studied = asyncio.Event()

    def deliver(self, rows: Sequence[Row]) -> None:
        records = [(row.kind, record) for row in rows if (record := self._read(row))]
        self.own += sum(record.writer == self._writer for _, record in records)
        first = [record.example for kind, record in records if kind == KIND]
        learnt = self._foreteller.learn(first)
        self._learnt(learnt, sum(row.kind == KIND for row in rows) - learnt)
        self._came.set()
        ruled = [self._ruled(record) for _, record in records]
        self._backlog.extend(example for example in ruled if example.query.features)
        if self._backlog:
            self._studied.clear()

    async def run(self) -> None:
        """Study what waits, until cancelled."""
        while True:
            while self._backlog:
                async with self._desk.turn() as do:
                    await self._study(do)
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

    async def _study(self, do: Do) -> None:
        some = [self._backlog.popleft() for _ in range(min(SLICE, len(self._backlog)))]
        try:
            await do(partial(self._foreteller.study, some))
        except Exception:
            if not self.unstudied:
                log.exception("the model could not learn from outcomes; this is said once")
            self.unstudied += len(some)
        else:
            self.examples += len(some)

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
