"""What a round sees: every job and worker as columns, frozen for as long as it decides."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import get_type_hints

import numpy as np
from numpy.typing import NDArray

from services.costs import CostModel
from services.forecast import Floats, Ints
from services.forecasttable import ForecastTable

Bools = NDArray[np.bool_]
NOWHERE = -1  # the home of a job that no worker has
CHAIN = 32  # hashes of a prompt's first blocks that a job is placed by
USUAL_TOKENS = 512  # what a request is taken to hold where workers are compared

_NO_INTS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """One row a live job; lengths in tokens, times in seconds of the scheduler's clock.

    `home` is the worker that has its tokens, or NOWHERE; `held` what it has in KV there, on the
    device or at rest, and `blocks` what it holds of the device; `limit` the output it may make by
    itself; `cap` the most it may ever make. `total` is E[L | L > output], never over the cap.
    `admitted` counts admissions: who runs for longer has the smaller number. `preemptions` count
    every time it was stopped, `evictions` those for want of memory. `since_s` is when it came to
    wait, `first_s` when its first token was heard of, infinite before. `tenant` is whose it is,
    `weight` that one's share beside others'. Lower `priority` goes before higher.
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

    def select(self, rows: Ints) -> "RequestColumns":
        """These rows, copied."""
        return RequestColumns(*(getattr(self, each.name)[rows] for each in fields(self)))

    def __len__(self) -> int:
        return len(self.serial)

    @property
    def context(self) -> Ints:
        """What must be in KV for a job to go on."""
        return self.prompt + self.output

    @property
    def expected_remaining(self) -> Floats:
        """Output tokens still expected."""
        return np.maximum(self.total - self.output, 0.0)

    @property
    def slice_exhausted(self) -> Bools:
        """Those whose slice has ended, but not their answer."""
        spent: Bools = (self.output >= self.limit) & (self.limit < self.cap)
        return spent


FLOATS = frozenset(name for name, kind in get_type_hints(RequestColumns).items() if kind == Floats)


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as a round sees it. `number` is what a job's `home` names; `shared_blocks` counts
    how often a block is held beyond its first holder; `prefixes` are the hashes, ascending, of the
    prompts' blocks that it said it has cached."""

    number: int
    model: int
    kv_tokens: int
    block_tokens: int
    max_running: int
    reach_tokens: int
    cost: CostModel
    shared_blocks: int = 0
    prefixes: Ints = field(default_factory=lambda: _NO_INTS, compare=False)

    @property
    def room_tokens(self) -> int:
        """KV tokens, where what several share is counted with each of them."""
        return self.kv_tokens + self.shared_blocks * self.block_tokens

    @property
    def full_seqs(self) -> int:
        """As many as run there when its memory is full."""
        return max(1, min(self.max_running, self.kv_tokens // USUAL_TOKENS))

    @property
    def full_speed(self) -> float:
        """Tokens a second with as many running as its memory takes: what a slow worker, or a
        small one, counts for beside others."""
        return self.cost.decode_tokens_per_s(self.full_seqs, USUAL_TOKENS)

    def whole_blocks(self, tokens: Ints) -> Ints:
        """So many tokens take this much, for blocks are given whole."""
        return -(-tokens // self.block_tokens) * self.block_tokens


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The board at one moment. `queued` and `running` are rows of `jobs`; other rows are free,
    or have no forecast yet. `chains`, (rows, CHAIN), are the hashes of a prompt's first blocks,
    0 where there is none; empty where nobody has any. `evictions` and `endings` count all so far.
    Nobody may write to the columns."""

    now: float
    jobs: RequestColumns
    queued: Ints
    running: Ints
    workers: tuple[WorkerSnapshot, ...]
    forecasts: ForecastTable
    chains: Ints = field(default_factory=lambda: np.zeros((0, CHAIN), np.int64))
    evictions: int = 0
    endings: int = 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Those who run or could, a row each: what a round comes down to once they are in order.

    Rows are compact here: `rows` says which of the board's they are. `runs` are those that run
    now; `key` ascends by urgency, and `line` is the same but for those that run, whom it moves
    ahead of whoever may not take their place. `cached`, (rows, workers), are the prompt tokens
    that each would find at each worker, where the preset places by them. `numbers` and `notes`
    are what the policies remember of the whole, and what the arrangement noted of these jobs.
    Self-contained but for the forecasts, so that another process can decide it.
    """

    round: int
    now: float
    rows: Ints
    is_running: Bools
    key: Floats
    queue_key: Floats
    jobs: RequestColumns
    workers: tuple[WorkerSnapshot, ...]
    cached: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    numbers: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Floats] = field(default_factory=dict)

    def noted(self, name: str) -> Floats:
        """A column of what was noted; 0 of those not seen."""
        return self.notes.get(name, np.zeros(len(self.rows)))

    def is_paused_with_kv(self) -> Bools:
        """Those that wait with KV at their home."""
        resting: Bools = ~self.is_running & (self.jobs.home != NOWHERE) & (self.jobs.held > 0)
        return resting
