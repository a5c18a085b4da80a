"""Trains the predictor from the outcome log; all replicas of one log learn the same."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from services.predictor.blend.guarded_forecaster import GuardedForecaster
from services.predictor.interface import Example
from services.predictor.learning.records import KIND, EncodedBy, Record, decode
from services.predictor.learning.rules import Rule
from services.predictor.serving.executor import CpuBudgetedExecutor, RunWork
from services.runtime.outcomelog import Row

log = logging.getLogger(__name__)


STUDY_INTERVAL_S = 1.0  # between two checks of the backlog
SLICE = 16  # examples per turn: a few tens of milliseconds with six members


class OutcomeLearner:
    """Consumes rows as the journal delivers them, including rows of this process.

    Lengths are learned at once. Prompts are studied later in `run`, on the executor and within its
    budget. When the backlog is full, the oldest examples are dropped.

    rule: selects the prompts to train on; of the others only the length is learned.
    encoded_by: the encoder of the features, None when no prompts are read.
    writer: marks rows of this process.
    leave_out: API keys and reporting processes, by name, with outcomes that are not learned.
    backlog_max: 10 kB each; at least the training set size, so that replaying a log loses none.
    on_learned: called with the number of outcomes learned and the number skipped.
    """

    def __init__(
        self,
        forecaster: GuardedForecaster,
        rule: Rule,
        encoded_by: EncodedBy | None,
        writer: str,
        leave_out: Collection[str],
        backlog_max: int,
        executor: CpuBudgetedExecutor,
        on_learned: Callable[[int, int], None],
    ):
        self.examples = 0  # examples studied with features
        self.unreadable = 0  # rows
        self.failed_to_study = 0  # examples that the model failed on
        self.delivered_own = 0  # rows of this process
        self._forecaster = forecaster
        self._rule = rule
        self._encoded_by = encoded_by
        self._writer = writer
        self._leave_out = frozenset(leave_out)
        self._on_learned = on_learned
        self._executor = executor
        self._backlog: deque[Example] = deque(maxlen=backlog_max)
        self._delivered = asyncio.Event()
        self._studied = asyncio.Event()

    def deliver(self, rows: Sequence[Row]) -> None:
        records = [(row.kind, record) for row in rows if (record := self._read(row))]
        self.delivered_own += sum(record.writer == self._writer for _, record in records)
        records = [each for each in records if not each[1].sources & self._leave_out]
        first = [record.example for kind, record in records if kind == KIND]
        learned = self._forecaster.learn(first)
        self._on_learned(learned, sum(row.kind == KIND for row in rows) - learned)
        self._delivered.set()
        self._backlog.extend(r.example for _, r in records if self._trains_on(r))
        if self._backlog:
            self._studied.clear()

    async def run(self) -> None:
        """Studies the backlog until cancelled."""
        while True:
            while self._backlog:
                async with self._executor.turn() as run:
                    await self._study(run)
            self._studied.set()
            await asyncio.sleep(STUDY_INTERVAL_S)

    async def wait_for_own_rows(self, own: int, limit_s: float) -> None:
        """Returns when `own` rows of this process were delivered, or after `limit_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.delivered_own < own:
                    self._delivered.clear()
                    await self._delivered.wait()

    async def wait_until_studied(self) -> None:
        """Returns when the backlog is empty."""
        await self._studied.wait()

    async def _study(self, run: RunWork) -> None:
        examples = [self._backlog.popleft() for _ in range(min(SLICE, len(self._backlog)))]
        try:
            await run(partial(self._forecaster.study, examples))
        except Exception:
            if not self.failed_to_study:
                log.exception("the prompt model could not learn from outcomes (logged once)")
            self.failed_to_study += len(examples)
        else:
            self.examples += len(examples)

    def _read(self, row: Row) -> Record | None:
        try:
            return decode(row, self._encoded_by)
        except ValueError as error:
            if not self.unreadable:
                log.warning("the outcome log has unreadable rows (%s); they are skipped", error)
            self.unreadable += 1
            return None

    def _trains_on(self, record: Record) -> bool:
        example = record.example
        has_features = example.query.features is not None
        return has_features and self._rule(record.forecast_mean, example.output_tokens)
