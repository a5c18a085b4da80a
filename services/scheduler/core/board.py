"""The board: every live request as a row of columns, every distinct forecast stored once.

Rows are reused; a serial, never reused, distinguishes successive requests of a row. Columns grow in
place by doubling. Changes of many requests are written as one vectorised operation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import inf
from zlib import crc32

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
from services.scheduler.core.phases import RequestPhase
from services.scheduler.core.tenants import Tenants

INITIAL_ROWS = 256
BUDGETS = frozenset(("deadline_s", "ttft_s", "tpot_s", "mtpot_s"))
QUEUED, RUNNING = int(RequestPhase.QUEUED), int(RequestPhase.RUNNING)
UNKNOWN = Forecast((float(UNCAPPED),), (1.0,), UNCAPPED, "unknown", 0, "unknown")


class Board:
    """Owned and changed by the ledger. Policies read it through `snapshot`."""

    def __init__(self, tenant_weights: Mapping[str, float] | None = None) -> None:
        self.tenants = Tenants(tenant_weights or {})
        self.forecasts = ForecastTable(INITIAL_ROWS)
        self.phase: NDArray[np.int8] = np.zeros(INITIAL_ROWS, np.int8)
        self.names: NDArray[np.object_] = _no_names(INITIAL_ROWS)  # request ids
        self.jobs = _free_rows(INITIAL_ROWS)
        self._frozen = _read_only(self.jobs)
        self.chains: Ints = np.zeros((INITIAL_ROWS, CHAIN), np.int64)
        self.evictions = self.endings = 0  # totals
        self._free = list(range(INITIAL_ROWS))[::-1]
        self._serial = self._admitted = 0
        self._outdated: NDArray[np.bool_] = np.zeros(INITIAL_ROWS, bool)  # rows of `total`
        self.models: dict[str, int] = {}
        self._unknown = self.forecasts.intern(UNKNOWN)

    @property
    def free_rows(self) -> int:
        return len(self._free)

    @property
    def forecasts_in_use(self) -> int:
        """Distinct forecasts of live requests, and the unknown one. O(rows)."""
        return len({self._unknown, *self.jobs.forecast[self.phase != RequestPhase.NONE].tolist()})

    def model_number(self, name: str) -> int:
        return self.models.setdefault(name, len(self.models))

    def add(self, request: Request) -> int:
        """Fills a row for a request without a forecast; returns the row. It is taken at the end:
        after an error it is free."""
        if not self._free:
            self._grow()
        row = self._free[-1]
        self._serial += 1
        self.names[row] = request.request_id
        jobs = self.jobs
        jobs.serial[row] = self._serial
        jobs.model[row] = self.model_number(request.model)
        jobs.home[row] = NOWHERE
        jobs.prompt[row] = request.prompt_tokens
        jobs.output[row] = request.delivered_tokens
        jobs.cap[row] = jobs.total[row] = request.max_tokens
        for column in (jobs.held, jobs.blocks, jobs.limit, jobs.admitted, jobs.preemptions):
            column[row] = 0
        jobs.evictions[row] = 0
        jobs.priority[row] = request.priority
        jobs.adapter[row] = adapter_number(request.adapter)
        self.chains[row] = 0
        self.chains[row, : len(request.prefix_hashes)] = request.prefix_hashes
        jobs.forecast[row] = self._unknown
        jobs.arrival_s[row], jobs.deadline_s[row] = request.arrival_s, request.deadline_s
        jobs.ttft_s[row], jobs.tpot_s[row] = request.sla.ttft_s, request.sla.tpot_s
        jobs.mtpot_s[row] = request.sla.mtpot_s
        jobs.since_s[row] = jobs.first_s[row] = inf
        jobs.tenant[row], jobs.weight[row] = self.tenants.enter(request.tenant, request.weight)
        self._free.pop()
        return row

    def remove(self, row: int) -> None:
        """Frees a row."""
        self._release(int(self.jobs.forecast[row]))
        self.tenants.leave(int(self.jobs.tenant[row]))
        self._outdated[row] = False
        self.names[row] = ""
        self.jobs.forecast[row] = self._unknown
        for name in BUDGETS:
            getattr(self.jobs, name)[row] = inf
        self._free.append(row)

    def set_forecast(self, row: int, forecast: Forecast, least: int = 0) -> None:
        """Replaces a row's forecast by that of L | L ≥ least. The earlier one is dropped with its
        last user."""
        jobs, known = self.jobs, int(self.jobs.forecast[row])
        jobs.forecast[row] = self.forecasts.intern(forecast, least)
        bounded = forecast.at_least(least)
        jobs.total[row] = bounded.mean(int(jobs.output[row]), int(jobs.cap[row]))
        self._outdated[row] = False
        self._release(known)

    def _release(self, forecast: int) -> None:
        if forecast != self._unknown:
            self.forecasts.release(forecast)

    def renew(self, forecast: Forecast) -> None:
        """Replaces a population's forecast for every row that uses an earlier version of it."""
        if rows := self.forecasts.renew(forecast):
            live = np.isin(self.jobs.forecast, rows) & (self.phase != RequestPhase.NONE)
            self._outdated |= live
            self.update_totals()

    def advance(self, rows: Ints, output: Ints, held: Ints, blocks: Ints, now: float) -> None:
        """Applies a report's progress. Output never decreases. `total` follows in `update_totals`.
        One vectorised pass over the rows of a report: below a microsecond each."""
        jobs = self.jobs
        begins = (output > 0) & (jobs.first_s[rows] == inf)
        if begins.any():
            jobs.first_s[rows[begins]] = now
        jobs.output[rows] = np.maximum(jobs.output[rows], output)
        jobs.held[rows], jobs.blocks[rows] = held, blocks
        self._outdated[rows] = True

    def update_totals(self) -> None:
        """Recomputes the expected total output of the rows that have advanced, or have a newer
        forecast, since the last call. Each snapshot does: reports are more frequent."""
        rows, jobs = self._outdated.nonzero()[0], self.jobs
        if not len(rows):
            return
        self._outdated[rows] = False
        jobs.total[rows] = self.forecasts.mean(
            jobs.forecast[rows], jobs.output[rows], jobs.cap[rows]
        )

    def admit(self, rows: Ints, homes: Sequence[int], limits: Sequence[int]) -> None:
        """Admits them in this order."""
        self.jobs.home[rows], self.jobs.limit[rows] = homes, limits
        self.jobs.admitted[rows] = np.arange(len(rows)) + self._admitted + 1
        self._admitted += len(rows)

    def lose_home(self, rows: Ints) -> None:
        """Records that no worker holds any KV of these rows."""
        jobs = self.jobs
        jobs.home[rows] = NOWHERE
        jobs.held[rows] = jobs.blocks[rows] = 0

    @property
    def any_queued(self) -> bool:
        return bool((self.phase == QUEUED).any())

    def snapshot(self, now: float, workers: tuple[WorkerSnapshot, ...]) -> Snapshot:
        """A read-only view; nothing is copied."""
        self.update_totals()
        return Snapshot(
            now,
            self._frozen,
            (self.phase == QUEUED).nonzero()[0],
            (self.phase == RUNNING).nonzero()[0],
            workers,
            self.forecasts,
            self.chains,
            self.evictions,
            self.endings,
        )

    def _grow(self) -> None:
        rows = len(self.phase)
        more = _free_rows(rows)
        self.jobs = RequestColumns(
            *(
                np.concatenate([getattr(self.jobs, each.name), getattr(more, each.name)])
                for each in fields(RequestColumns)
            )
        )
        self._frozen = _read_only(self.jobs)
        self.chains = np.concatenate([self.chains, np.zeros((rows, CHAIN), np.int64)])
        self.phase = np.concatenate([self.phase, np.zeros(rows, np.int8)])
        self.names = np.concatenate([self.names, _no_names(rows)])
        self._outdated = np.concatenate([self._outdated, np.zeros(rows, bool)])
        self._free = list(range(rows, 2 * rows))[::-1]


def adapter_number(name: str) -> int:
    """The number of a LoRA adapter in columns; 0 for none. Two adapters of one number count as
    one, and take turns at their worker."""
    return crc32(name.encode()) if name else 0


def _no_names(rows: int) -> NDArray[np.object_]:
    return np.full(rows, "", object)


def _free_rows(rows: int) -> RequestColumns:
    """Zeros, without budgets: a policy looks at whole columns to find out whether any has one."""
    return RequestColumns(
        *(
            np.full(rows, inf if each.name in BUDGETS else 0, _kind(each.name))
            for each in fields(RequestColumns)
        )
    )


def _kind(column: str) -> type:
    return float if column in FLOATS else np.int64


def _read_only(jobs: RequestColumns) -> RequestColumns:
    views = [getattr(jobs, each.name).view() for each in fields(RequestColumns)]
    for view in views:
        view.flags.writeable = False
    return RequestColumns(*views)
