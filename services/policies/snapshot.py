"""What a round sees: every job and worker as columns, frozen for as long as it decides."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from services.core import CostModel
from services.forecast import Floats, ForecastTable, Ints

Bools = NDArray[np.bool_]
NOWHERE = -1  # the home of a job that no worker has
USUAL_TOKENS = 512  # what a request is taken to hold where workers are compared


@dataclass(frozen=True, slots=True)
class Jobs:
    """One row a live job; lengths in tokens, times in seconds of the scheduler's clock.

    `home` is the worker that has its tokens, or NOWHERE; `held` what it has in KV there, on the
    device or at rest, and `blocks` what it holds of the device; `limit` the output it may make by
    itself; `cap` the most it may ever make. `total` is E[L | L > output], never over the cap.
    `admitted` counts admissions: who runs for longer has the smaller number. `since_s` is when it
    came to wait.
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
    forecast: Ints
    total: Floats
    arrival_s: Floats
    since_s: Floats
    deadline_s: Floats
    ttft_s: Floats
    tpot_s: Floats

    def take(self, rows: Ints) -> "Jobs":
        """These rows, copied."""
        return Jobs(*(getattr(self, each.name)[rows] for each in fields(self)))

    def __len__(self) -> int:
        return len(self.serial)

    @property
    def context(self) -> Ints:
        """What must be in KV for a job to go on."""
        return self.prompt + self.output

    @property
    def left(self) -> Floats:
        """Output tokens still expected."""
        return np.maximum(self.total - self.output, 0.0)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as a round sees it. `number` is what a job's `home` names; `shared_blocks` counts
    how often a block is held beyond its first holder."""

    number: int
    model: int
    kv_tokens: int
    block_tokens: int
    places: int
    reach_tokens: int
    cost: CostModel
    shared_blocks: int = 0

    @property
    def room_tokens(self) -> int:
        """KV tokens, where what several share is counted with each of them."""
        return self.kv_tokens + self.shared_blocks * self.block_tokens

    @property
    def full_speed(self) -> float:
        """Tokens a second with as many running as its memory takes: what a slow worker, or a
        small one, counts for beside others."""
        seqs = max(1, min(self.places, self.kv_tokens // USUAL_TOKENS))
        return self.cost.decode_tokens_per_s(seqs, USUAL_TOKENS)

    def whole_blocks(self, tokens: Ints) -> Ints:
        """So many tokens take this much, for blocks are given whole."""
        return -(-tokens // self.block_tokens) * self.block_tokens


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The board at one moment. `queued` and `running` are rows of `jobs`; other rows are free,
    or have no forecast yet. Nobody may write to the columns."""

    now: float
    jobs: Jobs
    queued: Ints
    running: Ints
    workers: tuple[Worker, ...]
    forecasts: ForecastTable


@dataclass(frozen=True, slots=True)
class Contest:
    """Those who run or could, a row each: what a round comes down to once they are in order.

    Rows are compact here: `rows` says which of the board's they are. `runs` are those that run
    now; `key` ascends by urgency, and `line` is the same but for those that run, whom it moves
    ahead of whoever may not take their place. Self-contained but for the forecasts, so that
    another process can decide it.
    """

    round: int
    now: float
    rows: Ints
    runs: Bools
    key: Floats
    line: Floats
    jobs: Jobs
    workers: tuple[Worker, ...]

    def resting(self) -> Bools:
        """Those that wait with KV at their home."""
        resting: Bools = ~self.runs & (self.jobs.home != NOWHERE) & (self.jobs.held > 0)
        return resting
