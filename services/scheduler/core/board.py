"""The board: every live request as a row of columns, every forecast interned once.

Rows are reused; a serial, never twice given, tells one tenant of a row from the next. Columns grow
in place by doubling. What happens to many requests at once is written at once.
"""

from collections.abc import Mapping
from dataclasses import fields
from enum import IntEnum
from math import inf

import numpy as np
from numpy.typing import NDArray

from services.core import Request
from services.forecast import UNCAPPED, Forecast, Ints
from services.forecasttable import ForecastTable
from services.policies.snapshot import (
    CHAIN,
    FLOATS,
    NOWHERE,
    RequestColumns,
    Snapshot,
    WorkerSnapshot,
)
from services.scheduler.core.tenants import Tenants

FIRST_ROWS = 256
UNFORESEEN = Forecast((float(UNCAPPED),), (1.0,), UNCAPPED, "unforeseen", 0, "unforeseen")


class RequestPhase(IntEnum):
    FREE = 0  # nobody's row
    FORECASTING = 1
    AWAITED = 2  # a worker that is not back yet is said to have it
    QUEUED = 3
    RUNNING = 4


class Board:
    """Owned by the state, changed by nobody else. Policies see it through `snapshot`."""

    def __init__(self, tenant_weights: Mapping[str, float] | None = None) -> None:
        self.tenants = Tenants(tenant_weights or {})
        self.forecasts = ForecastTable(FIRST_ROWS)
        self.phase: NDArray[np.int8] = np.zeros(FIRST_ROWS, np.int8)
        self.jobs = _blank(FIRST_ROWS)
        self._frozen = _read_only(self.jobs)
        self.chains: Ints = np.zeros((FIRST_ROWS, CHAIN), np.int64)
        self.evictions = self.endings = 0  # so far
        self._free = list(range(FIRST_ROWS))[::-1]
        self._serial = self._admitted = 0
        self.models: dict[str, int] = {}
        self._unforeseen = self.forecasts.intern(UNFORESEEN)

    def model(self, name: str) -> int:
        return self.models.setdefault(name, len(self.models))

    def add(self, request: Request) -> int:
        """A row for a request, with nothing foreseen of it."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._serial += 1
        jobs = self.jobs
        self.phase[row] = RequestPhase.FORECASTING
        jobs.serial[row] = self._serial
        jobs.model[row] = self.model(request.model)
        jobs.home[row] = NOWHERE
        jobs.prompt[row] = request.prompt_tokens
        jobs.output[row] = request.delivered_tokens
        jobs.cap[row] = jobs.total[row] = request.max_tokens
        for column in (jobs.held, jobs.blocks, jobs.limit, jobs.admitted, jobs.preemptions):
            column[row] = 0
        jobs.evictions[row] = 0
        jobs.tenant[row], jobs.weight[row] = self.tenants.enter(request.tenant)
        jobs.priority[row] = request.priority
        self.chains[row] = 0
        self.chains[row, : len(request.prefix_hashes)] = request.prefix_hashes
        jobs.forecast[row] = self._unforeseen
        jobs.arrival_s[row], jobs.deadline_s[row] = request.arrival_s, request.deadline_s
        jobs.ttft_s[row], jobs.tpot_s[row] = request.sla.ttft_s, request.sla.tpot_s
        jobs.mtpot_s[row] = request.sla.mtpot_s
        jobs.since_s[row] = jobs.first_s[row] = inf
        return row

    def remove(self, row: int) -> None:
        self._release(int(self.jobs.forecast[row]))
        self.tenants.leave(int(self.jobs.tenant[row]))
        self.jobs.forecast[row] = self._unforeseen
        self.phase[row] = RequestPhase.FREE
        self._free.append(row)

    def foresee(self, row: int, forecast: Forecast) -> None:
        """Its forecast from now on; the one before is forgotten with its last user."""
        jobs, known = self.jobs, int(self.jobs.forecast[row])
        jobs.forecast[row] = self.forecasts.intern(forecast)
        jobs.total[row] = forecast.mean(int(jobs.output[row]), int(jobs.cap[row]))
        self._release(known)

    def _release(self, forecast: int) -> None:
        if forecast != self._unforeseen:
            self.forecasts.release(forecast)

    def renew(self, forecast: Forecast) -> None:
        """A population's newer forecast, for all who have its older one."""
        row = self.forecasts.renew(forecast)
        if row is not None:
            live = (self.jobs.forecast == row) & (self.phase != RequestPhase.FREE)
            self.recount(np.flatnonzero(live))

    def advance(self, rows: Ints, output: Ints, held: Ints, blocks: Ints, now: float) -> None:
        """What these have by their worker's last word, which never takes tokens back. One pass of
        numpy over all rows of a report: below a microsecond each."""
        jobs = self.jobs
        first = rows[(output > 0) & (jobs.first_s[rows] == inf)]
        jobs.first_s[first] = now
        jobs.output[rows] = np.maximum(jobs.output[rows], output)
        jobs.held[rows], jobs.blocks[rows] = held, blocks
        self.recount(rows)

    def recount(self, rows: Ints) -> None:
        """The lengths expected of these, given what is there."""
        jobs = self.jobs
        jobs.total[rows] = self.forecasts.mean(
            jobs.forecast[rows], jobs.output[rows], jobs.cap[rows]
        )

    def admit(self, row: int, home: int, limit: int) -> None:
        self._admitted += 1
        self.phase[row] = RequestPhase.RUNNING
        self.jobs.home[row], self.jobs.limit[row] = home, limit
        self.jobs.admitted[row] = self._admitted

    def queue(self, row: int, now: float) -> None:
        """It waits from now on."""
        self.phase[row] = RequestPhase.QUEUED
        self.jobs.since_s[row] = now

    def lose_home(self, rows: Ints) -> None:
        """Nothing of these is left anywhere."""
        jobs = self.jobs
        jobs.home[rows] = NOWHERE
        jobs.held[rows] = jobs.blocks[rows] = 0

    def snapshot(self, now: float, workers: tuple[WorkerSnapshot, ...]) -> Snapshot:
        """The board as it is: nothing is copied, and policies can't write to it."""
        return Snapshot(
            now,
            self._frozen,
            np.flatnonzero(self.phase == RequestPhase.QUEUED),
            np.flatnonzero(self.phase == RequestPhase.RUNNING),
            workers,
            self.forecasts,
            self.chains,
            self.evictions,
            self.endings,
        )

    def _grow(self) -> None:
        rows = len(self.phase)
        more = _blank(rows)
        self.jobs = RequestColumns(
            *(
                np.concatenate([getattr(self.jobs, each.name), getattr(more, each.name)])
                for each in fields(RequestColumns)
            )
        )
        self._frozen = _read_only(self.jobs)
        self.chains = np.concatenate([self.chains, np.zeros((rows, CHAIN), np.int64)])
        self.phase = np.concatenate([self.phase, np.zeros(rows, np.int8)])
        self._free = list(range(rows, 2 * rows))[::-1]


def _blank(rows: int) -> RequestColumns:
    return RequestColumns(
        *(
            np.zeros(rows, float if each.name in FLOATS else np.int64)
            for each in fields(RequestColumns)
        )
    )


def _read_only(jobs: RequestColumns) -> RequestColumns:
    views = [getattr(jobs, each.name).view() for each in fields(RequestColumns)]
    for view in views:
        view.flags.writeable = False
    return RequestColumns(*views)
