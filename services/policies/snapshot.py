"""Inputs of a round: all requests and workers as frozen columns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Generic, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from services.costs import CostModel
from services.forecast import Floats, Ints
from services.forecasttable import ForecastTable

Bools = NDArray[np.bool_]
NOWHERE = -1  # home of a request that no worker holds
FEW = 512  # numbers up to which a sort of 64 bits is faster than a look at their range
CHAIN = 32  # prefix hashes per request used for placement
USUAL_TOKENS = 512  # KV tokens assumed per request when workers are compared

_NO_INTS: Ints = np.zeros(0, np.int64)


class _Derived:
    """What requests' columns say together, for `RequestColumns` and `SelectedColumns`."""

    __slots__ = ()
    prompt: Ints
    output: Ints
    held: Ints
    limit: Ints
    cap: Ints
    total: Floats

    @property
    def longest(self) -> Ints:
        """The most tokens that the request can have: the length that its worker must hold."""
        return self.prompt + self.cap

    def copy(self) -> "RequestColumns":
        """All columns, as they are now."""
        return RequestColumns(*(column.copy() for column in _columns(self)))

    def context_at(self, rows: Ints) -> Ints:
        """The context of these rows: tokens that must be in KV for the request to continue."""
        return self.prompt[rows] + self.output[rows]

    def longest_at(self, rows: Ints) -> Ints:
        """`longest` of these rows."""
        return self.prompt[rows] + self.cap[rows]

    def missing_at(self, rows: Ints) -> Ints:
        """Tokens of these rows' contexts that are not in KV."""
        missing: Ints = np.maximum(self.context_at(rows) - self.held[rows], 0)
        return missing

    @property
    def expected_remaining(self) -> Floats:
        """Output tokens still expected."""
        return np.maximum(self.total - self.output, 0.0)

    @property
    def slice_exhausted(self) -> Bools:
        """Requests at the end of their slice but not of their answer."""
        spent: Bools = (self.output >= self.limit) & (self.limit < self.cap)
        return spent


@dataclass(frozen=True, slots=True)
class RequestColumns(_Derived):
    """One row per live request; lengths in tokens, times in seconds of the scheduler's clock.

    `home` is the worker that holds its tokens, or NOWHERE. `held` is its KV there, on the device or
    in host memory; `blocks` its device blocks. `limit` is the output at which it stops for now,
    `cap` the most it may ever have. `total` is E[L | L > output], at most the cap. `admitted`
    counts admissions: a longer-running request has the smaller number. `preemptions` counts all
    stops, `evictions` those for lack of memory. `since_s` is when it started to wait. `first_s` is
    when its first token was reported, infinite before. `weight` is its tenant's share of the fleet.
    A lower `priority` goes first. `adapter` is a number for its LoRA adapter, 0 without one.
    """

    serial: Ints
    model: Ints
    home: Ints
    prompt: Ints
    output: Ints
    held: Ints
    blocks: Ints
    limit: Ints
    cap: Ints
    admitted: Ints
    preemptions: Ints
    evictions: Ints
    tenant: Ints
    priority: Ints
    adapter: Ints
    forecast: Ints
    total: Floats
    arrival_s: Floats
    since_s: Floats
    deadline_s: Floats
    first_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    mtpot_s: Floats
    weight: Floats

    def select(self, rows: Ints) -> "SelectedColumns":
        """These rows."""
        return SelectedColumns(self, rows)

    def __len__(self) -> int:
        return len(self.serial)

    @property
    def context(self) -> Ints:
        """Tokens that must be in KV for the request to continue."""
        return self.prompt + self.output


_Kind = TypeVar("_Kind", Ints, Floats)


class _Gathered(Generic[_Kind]):
    """A column that is gathered on first use, and read-only."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, selected: "SelectedColumns", owner: type) -> _Kind:
        column: _Kind = getattr(selected.board, self._name)[selected.rows]
        column.flags.writeable = False
        selected.__dict__[self._name] = column  # from now on it is found before this descriptor
        return column


class SelectedColumns(_Derived):
    """Columns of some rows of other columns, parallel to `rows`. Each is gathered on first use and
    once: most are read several times in a round, and many never. Valid until the board changes;
    `copy` stays valid."""

    serial = _Gathered[Ints]()
    model = _Gathered[Ints]()
    home = _Gathered[Ints]()
    prompt = _Gathered[Ints]()
    output = _Gathered[Ints]()
    held = _Gathered[Ints]()
    blocks = _Gathered[Ints]()
    limit = _Gathered[Ints]()
    cap = _Gathered[Ints]()
    admitted = _Gathered[Ints]()
    preemptions = _Gathered[Ints]()
    evictions = _Gathered[Ints]()
    tenant = _Gathered[Ints]()
    priority = _Gathered[Ints]()
    adapter = _Gathered[Ints]()
    forecast = _Gathered[Ints]()
    total = _Gathered[Floats]()
    arrival_s = _Gathered[Floats]()
    since_s = _Gathered[Floats]()
    deadline_s = _Gathered[Floats]()
    first_s = _Gathered[Floats]()
    ttft_s = _Gathered[Floats]()
    tpot_s = _Gathered[Floats]()
    mtpot_s = _Gathered[Floats]()
    weight = _Gathered[Floats]()

    def __init__(self, board: "RequestColumns | SelectedColumns", rows: Ints):
        self.board, self.rows = board, rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: Ints) -> "SelectedColumns":
        """These of the rows."""
        return SelectedColumns(self, rows)

    def replaced(self, **columns: Ints | Floats) -> "SelectedColumns":
        """The same with these columns instead."""
        other = SelectedColumns(self.board, self.rows)
        other.__dict__.update(columns)
        return other

    @cached_property
    def context(self) -> Ints:
        """As `RequestColumns.context`."""
        return self.prompt + self.output

    @cached_property
    def missing(self) -> Floats:
        """Tokens of each context that are not in KV."""
        missing: Floats = np.maximum(self.context - self.held, 0).astype(float)
        return missing


Columns = RequestColumns | SelectedColumns


def distinct(column: Ints) -> list[int]:
    """The values of a column, ascending. Most columns have one, which needs no sort."""
    one = not len(column) or bool((column == column[0]).all())
    values: list[int] = (column[:1] if one else np.unique(column)).tolist()
    return values


def whole_blocks(tokens: Ints, block_tokens: Ints | int) -> Ints:
    """Tokens rounded up to whole blocks."""
    return -(-tokens // block_tokens) * block_tokens


def stable_order(ids: Ints) -> Ints:
    """The stable order of these numbers. numpy sorts many numbers of 16 bits by radix, in a quarter
    of the time."""
    if len(ids) > FEW and int(ids.max()) - (least := int(ids.min())) < 2**16:
        return (ids - least).astype(np.uint16).argsort(kind="stable")
    return ids.argsort(kind="stable")


_columns = attrgetter(*(each.name for each in fields(RequestColumns)))
FLOATS = frozenset(name for name, kind in get_type_hints(RequestColumns).items() if kind == Floats)


@dataclass(frozen=True)
class WorkerSnapshot:
    """A worker in a round. `number` is the value of a request's `home`; `shared_blocks` counts
    holders of blocks beyond the first; `prefixes` are the ascending hashes of its cached blocks.
    `adapter_slots` are the LoRA adapters that it computes at a time, 0 without a limit; one in use
    keeps its slot for `adapter_turn_steps` steps while others wait."""

    number: int
    model: int
    kv_tokens: int
    block_tokens: int
    max_running: int
    reach_tokens: int
    cost: CostModel
    shared_blocks: int = 0
    prefixes: Ints = field(default_factory=lambda: _NO_INTS, compare=False)
    adapter_slots: int = 0
    adapter_turn_steps: int = 0

    def can_run(self, model: Ints, longest: Ints) -> Bools:
        """Which requests of these models and greatest lengths (prompt + cap) this worker can run
        to their end, whatever else it runs."""
        able: Bools = (model == self.model) & (longest <= self.reach_tokens)
        return able

    @property
    def room_tokens(self) -> int:
        """KV tokens, with shared blocks counted once per holder."""
        return self.kv_tokens + self.shared_blocks * self.block_tokens

    @cached_property
    def full_seqs(self) -> int:
        """Requests that run when its memory is full."""
        return max(1, min(self.max_running, self.kv_tokens // USUAL_TOKENS))

    @property
    def adapter_turn_s(self) -> float:
        """The time for which an adapter in use keeps its slot, with full memory."""
        cost = self.cost
        return self.adapter_turn_steps * (cost.base_s + cost.decode_seq_s * self.full_seqs)

    @cached_property
    def full_speed(self) -> float:
        """Tokens per second with full memory: the worker's weight among others."""
        return self.cost.decode_tokens_per_s(self.full_seqs, USUAL_TOKENS)

    @cached_property
    def token_costs(self) -> tuple[float, float, float, float]:
        """Seconds per token of prefill, per token of a sequence beside as many others as memory
        allows, and per context token that it reads; tokens per step."""
        cost = self.cost
        token_s = cost.base_s / self.full_seqs + cost.decode_seq_s
        return cost.prefill_token_s, token_s, cost.context_token_s, cost.tokens_per_step

    def whole_blocks(self, tokens: Ints) -> Ints:
        """Tokens rounded up to whole blocks."""
        return whole_blocks(tokens, self.block_tokens)


@dataclass(frozen=True)
class Snapshot:
    """The board at one moment; its columns are read-only.

    `queued` and `running` are rows of `jobs`; other rows are free or have no forecast yet.
    `chains`, (rows, CHAIN), are the prefix hashes of each prompt, 0 where there is none, and empty
    if no request has any. `evictions` and `endings` are totals so far. `turn` are the workers that
    the round decides about; empty for all.
    """

    now: float
    jobs: RequestColumns
    queued: Ints
    running: Ints
    workers: tuple[WorkerSnapshot, ...]
    forecasts: ForecastTable
    chains: Ints = field(default_factory=lambda: np.zeros((0, CHAIN), np.int64))
    evictions: int = 0
    endings: int = 0
    turn: tuple[WorkerSnapshot, ...] = ()

    @property
    def deciding(self) -> tuple[WorkerSnapshot, ...]:
        """The workers that the round decides about."""
        return self.turn or self.workers

    @cached_property
    def live(self) -> SelectedColumns:
        """The queued requests, then the running ones."""
        return SelectedColumns(self.jobs, np.concatenate([self.queued, self.running]))


@dataclass(frozen=True, slots=True)
class Candidates:
    """Requests that run or could run, in order of urgency: the input of an arrangement.

    `rows` are their board rows; the other columns are parallel to it. `key` ascends by urgency.
    `queue_key` is the key, except that a running request has a smaller one to precede the requests
    that may not preempt it. `cached`, (rows, workers), are prompt tokens cached at each worker, if
    the placement uses them. `numbers` and `notes` are what policies and the arrangement remember.
    Apart from the forecasts it is self-contained, so another process can arrange it. Unless `jobs`
    are a copy, it is valid until the board changes.
    """

    round: int
    now: float
    rows: Ints
    is_running: Bools
    key: Floats
    queue_key: Floats
    jobs: Columns
    workers: tuple[WorkerSnapshot, ...]
    cached: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    numbers: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Floats] = field(default_factory=dict)

    def noted(self, name: str) -> Floats:
        """A noted column; 0 for requests without a note."""
        return self.notes.get(name, np.zeros(len(self.rows)))

    def by_worker(self, numbers: Ints) -> tuple[Ints, Ints]:
        """The positions that have a worker's number in this column, by worker and ascending, and
        the index of each one's worker."""
        index = self.indices_of(numbers)
        at = (index != NOWHERE).nonzero()[0]
        at = at[stable_order(index[at])]
        return at, index[at]

    def at_each_worker(self, numbers: Ints) -> list[Ints]:
        """The same positions, those of each worker apart."""
        at, which = self.by_worker(numbers)
        bounds = which.searchsorted(np.arange(len(self.workers) + 1)).tolist()
        return [at[first:last] for first, last in pairwise(bounds)]

    def indices_of(self, numbers: Ints) -> Ints:
        """The indices of the workers with these numbers; NOWHERE for those of no worker here."""
        own = [worker.number for worker in self.workers]
        index = np.full(max([0, *own, int(numbers.max(initial=0))]) + 2, NOWHERE)
        index[own] = np.arange(len(own))
        # The last place, which is that of NOWHERE, has no worker; numbers below it have none, too.
        return index[np.maximum(numbers, NOWHERE)]

    def is_paused_with_kv(self) -> Bools:
        """Waiting requests with KV on their home worker."""
        resting: Bools = ~self.is_running & (self.jobs.home != NOWHERE) & (self.jobs.held > 0)
        return resting
