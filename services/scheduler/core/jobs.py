"""What the scheduler remembers of a request and of a worker beside the board's columns."""

from dataclasses import dataclass, field, replace

import numpy as np

from services.core import Grant, HeldRequest, Pause, Report, Request, StaticBatch, WorkerView
from services.costs import CostModel
from services.forecast import Forecast, Ints
from services.policies.decision import WorkerDecision
from services.runtime.prefix import MOST_TOLD


@dataclass(slots=True, eq=False)
class Job:
    """A live request: its numbers stand in the board's `row`.

    `admitted_seq` is the plan that last let it run, and `resumed_seq` the same where that was where
    it had been: evictions told before that was applied are history. Of an asker, whose client is
    told what is foreseen of it, `forecast` is what is known by now, and `ttft_s` the promise it was
    given and has not been told yet; `promised`, whether it was ever given one.
    """

    request: Request
    link: str
    row: int
    admitted_seq: int = 0
    resumed_seq: int = 0
    queued_s: float = 0.0
    shared_key: str = ""  # of its forecast's population
    forecast: Forecast | None = None
    ttft_s: float | None = None
    promised: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id


@dataclass(slots=True, eq=False)
class Draft:
    """Directives gathered during one step, sent as one plan."""

    admit: list[Grant] = field(default_factory=list)
    extend: list[Grant] = field(default_factory=list)
    pause: list[Pause] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    batches: list[StaticBatch] = field(default_factory=list)
    ask_prefixes: bool = False  # the worker does not know yet that it is to tell of them

    def forget(self, request_id: str) -> None:
        """Cancel it instead of anything else: workers carry out cancels first."""
        for grants in (self.admit, self.extend):
            grants[:] = [grant for grant in grants if grant.request_id != request_id]
        self.pause[:] = [pause for pause in self.pause if pause.request_id != request_id]
        self.batches[:] = [_without(request_id, batch) for batch in self.batches]
        self.cancel.append(request_id)

    def __bool__(self) -> bool:
        return bool(self.admit or self.extend or self.pause or self.cancel or self.ask_prefixes)


class Prefixes:
    """Hashes of the blocks that a worker can share, by its reports."""

    def __init__(self) -> None:
        self._here: set[int] = set()
        self._sorted: Ints | None = np.zeros(0, np.int64)

    def hear(self, report: Report) -> None:
        """O(news). Beyond MOST_TOLD, which no worker of ours tells, the rest is not listened to."""
        if report.prefixes_added or report.prefixes_gone:
            self._here.difference_update(report.prefixes_gone)
            room = max(0, MOST_TOLD - len(self._here))
            self._here.update(report.prefixes_added[:room])
            self._sorted = None

    @property
    def sorted(self) -> Ints:
        """Ascending; made anew once after a change, O(n log n): a millisecond for the most."""
        if self._sorted is None:
            self._sorted = np.fromiter(self._here, np.int64, len(self._here))
            self._sorted.sort()
        return self._sorted


def _without(request_id: str, batch: StaticBatch) -> StaticBatch:
    return replace(batch, members=tuple(name for name in batch.members if name != request_id))


@dataclass(slots=True, eq=False)
class Served:
    """A static batch that is being served: `had` is the output of each member when it began, of
    those who have not left it. `whole` while nobody left it but by its end or by a cancel."""

    began_s: float
    seqs: int
    length_tokens: int  # of the longest context
    had: dict[str, tuple[Job, int]]
    generated_tokens: int = 0
    whole: bool = True


@dataclass(slots=True, eq=False)
class WorkerJobs:
    """An attached worker, its `number` on the board, and what runs there.

    The scheduler owns `running`; the worker owns memory and says by reports what it holds.
    `pausing` are requests paused by the plan of that seq, until a report says it was applied.
    `orphans` came with it from before and nobody has asked for them yet. `peak_tokens` is the most
    KV that it was last foreseen to hold, None where no round has foreseen any; `admitted` counts
    who was given a place here. One that is `leaving` gets nobody any more.
    """

    view: WorkerView
    link: str
    number: int
    cost: CostModel
    free_blocks: int = 0
    shared_blocks: int = 0
    running: dict[str, Job] = field(default_factory=dict)
    draft: Draft = field(default_factory=Draft)
    pausing: dict[str, int] = field(default_factory=dict)
    orphans: dict[str, HeldRequest] = field(default_factory=dict)
    served: list[Served] = field(default_factory=list)
    prefixes: Prefixes = field(default_factory=Prefixes)
    victims: Ints = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # board rows, by the last round
    plan_seq: int = 0
    report_seq: int = 0
    admitted: int = 0
    peak_tokens: float | None = None
    leaving: bool = False

    @property
    def places(self) -> int:
        """How many of ours may run there: orphans that run have theirs."""
        return self.view.max_running - sum(held.running for held in self.orphans.values())

    @property
    def room_tokens(self) -> int:
        """KV tokens for ours: what orphans hold of the device is not free."""
        blocks = sum(held.blocks for held in self.orphans.values())
        return max(0, self.view.kv_tokens - blocks * self.view.block_tokens)

    @property
    def kv_blocks(self) -> int:
        return self.view.kv_tokens // self.view.block_tokens

    @property
    def used_tokens(self) -> int:
        """KV tokens of the blocks that somebody holds, by its last report."""
        return (self.kv_blocks - self.free_blocks) * self.view.block_tokens

    def heed(self, share: WorkerDecision) -> None:
        """What a round says of it beside who runs. A peak is foreseen only where somebody waits."""
        self.victims = share.victims
        if share.peak_tokens or not len(share.run):
            self.peak_tokens = share.peak_tokens

    def hear_of_orphans(self, report: Report) -> None:
        """Whoever asks for one later must find it as it is by then, and not what has ended."""
        for told in (*report.progress, *report.evicted):
            if held := self.orphans.get(told.request_id):
                self.orphans[told.request_id] = replace(
                    held,
                    output_tokens=told.output_tokens,
                    held_tokens=told.held_tokens,
                    blocks=told.blocks,
                    running=held.running and told not in report.evicted,
                )
        for completion in report.finished:
            self.orphans.pop(completion.request_id, None)
