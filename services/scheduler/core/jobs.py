"""The scheduler's records of a request and of a worker, beside the board's columns, and the fleet's
load as values."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from services.core import (
    FinishReason,
    Grant,
    HeldRequest,
    Outcome,
    Pause,
    Report,
    Request,
    StaticBatch,
    WorkerView,
)
from services.costs import CostModel
from services.forecast import Forecast, Ints
from services.policies.decision import WorkerDecision
from services.policies.snapshot import WorkerSnapshot
from services.runtime.prefix import MAX_REPORTED_PREFIXES
from services.scheduler.core.failures.suspicion import NOT_SILENT, Silence

MIN_SPEED_CHANGE = 0.02  # relative change of the tokens per step that counts


@dataclass(slots=True, eq=False)
class Job:
    """A live request; its numbers are in the board's `row`.

    `admitted_seq` is the plan that last admitted it. `resumed_seq` is the same where that worker
    had its tokens already: evictions reported before that plan was applied are out of date.
    The last three fields serve requests with `include_forecast`: the current `forecast`, the
    expected `ttft_s` while it has not been sent, and whether one was ever made (`promised`).
    """

    request: Request
    link: str
    row: int
    admitted_seq: int = 0
    resumed_seq: int = 0
    queued_s: float = 0.0  # time in the queue, up to the last admission
    shared_key: str = ""  # of the population that shares its forecast
    forecast: Forecast | None = None
    ttft_s: float | None = None
    promised: bool = False
    request_id: str = field(init=False)  # the request's: rounds read it of hundreds of jobs

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id

    def accept(self, forecast: Forecast) -> bool:
        """Replaces the forecast to send by this one, for at least the request's `min_tokens`.
        Returns whether it is another."""
        before, self.forecast = self.forecast, forecast.at_least(self.request.min_tokens)
        return self.forecast != before

    def outcome(
        self, reason: FinishReason, output_tokens: int, preemptions: int, now: float
    ) -> Outcome:
        """What there is to learn from its end."""
        request = self.request
        return Outcome(
            request.request_id,
            request.model,
            request.application,
            request.prompt_tokens,
            output_tokens,
            request.max_tokens,
            reason,
            now - request.arrival_s,
            preemptions,
            request.key_name,
        )


@dataclass(slots=True, eq=False)
class Draft:
    """Directives gathered during one step, sent as one plan."""

    admit: list[Grant] = field(default_factory=list)
    extend: list[Grant] = field(default_factory=list)
    pause: list[Pause] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)
    batches: list[StaticBatch] = field(default_factory=list)
    ask_prefixes: bool = False  # the worker does not report its cached prefixes yet

    def forget(self, request_id: str) -> None:
        """Replaces every directive about a request by a cancel, which workers carry out first."""
        for grants in (self.admit, self.extend):
            grants[:] = [grant for grant in grants if grant.request_id != request_id]
        self.pause[:] = [pause for pause in self.pause if pause.request_id != request_id]
        self.batches[:] = [_without(request_id, batch) for batch in self.batches]
        self.cancel.append(request_id)

    def __bool__(self) -> bool:
        return bool(self.admit or self.extend or self.pause or self.cancel or self.ask_prefixes)


def _without(request_id: str, batch: StaticBatch) -> StaticBatch:
    return replace(batch, members=tuple(name for name in batch.members if name != request_id))


class PrefixIndex:
    """Hashes of the blocks that a worker reports as shareable."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()
        self._sorted: Ints | None = np.zeros(0, np.int64)

    def update(self, report: Report) -> None:
        """O(changes). Hashes beyond MAX_REPORTED_PREFIXES, which no worker sends, are ignored."""
        if report.prefixes_added or report.prefixes_gone:
            self._hashes.difference_update(report.prefixes_gone)
            room = max(0, MAX_REPORTED_PREFIXES - len(self._hashes))
            self._hashes.update(report.prefixes_added[:room])
            self._sorted = None

    def count_leading(self, hashes: Sequence[int]) -> int:
        """How many of these are here, up to the first that is not."""
        for nth, name in enumerate(hashes):
            if name not in self._hashes:
                return nth
        return len(hashes)

    @property
    def sorted(self) -> Ints:
        """Ascending; built once after a change in O(n log n), a millisecond at the bound."""
        if self._sorted is None:
            self._sorted = np.fromiter(self._hashes, np.int64, len(self._hashes))
            self._sorted.sort()
        return self._sorted


@dataclass(slots=True, eq=False)
class ServedBatch:
    """A static batch that a worker serves.

    `members` are the requests that have not left it, with their output when it began. `whole` turns
    false when a member leaves otherwise than by its end or by a cancel.
    """

    began_s: float
    seqs: int
    length_tokens: int  # the longest context
    members: dict[str, tuple[Job, int]]
    generated_tokens: int = 0
    whole: bool = True


@dataclass(slots=True, eq=False)
class WorkerJobs:
    """An attached worker, its `number` on the board, and the requests that run there.

    The scheduler owns `running`; the worker owns memory and reports what it holds.
    `pausing` maps a paused request to the plan that paused it, until a report applies that plan.
    `orphans` are requests that the worker has from before and no gateway has submitted again.
    `peak_tokens` is the KV peak that the last round expected, None before the first.
    `admitted` counts admissions. A `draining` worker receives no more requests. `most_running` is
    the last reported limit of running requests, 0 for the announced one. `applied_seq` is the last
    plan that it has reported as applied; `fence_seq` is the plan that cancels its copies of
    requests that continue elsewhere. `heard`: it has said something since the last check.
    `beats`: it also says something while it is idle, which workers of earlier versions do not.
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
    served: list[ServedBatch] = field(default_factory=list)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    victims: Ints = field(  # board rows, from the last round
        default_factory=lambda: np.zeros(0, np.int64)
    )
    plan_seq: int = 0
    report_seq: int = 0
    admitted: int = 0
    peak_tokens: float | None = None
    applied_seq: int = 0
    fence_seq: int = 0
    draining: bool = False
    heard: bool = True
    beats: bool = False
    silence: Silence = NOT_SILENT
    most_running: int = 0
    last_snapshot: WorkerSnapshot | None = None

    def set_cost(self, cost: CostModel) -> None:
        """Sets a newer cost model. The tokens per step are the worker's, and stay."""
        known = self.cost.tokens_per_step
        same = cost.tokens_per_step == known
        self.cost = cost if same else replace(cost, tokens_per_step=known)

    def set_tokens_per_step(self, tokens: float) -> None:
        """Sets what the worker measured, unless it has hardly changed: with another cost model the
        snapshot's derived values are computed again."""
        known = self.cost.tokens_per_step
        if abs(tokens - known) > MIN_SPEED_CHANGE * known:
            self.cost = replace(self.cost, tokens_per_step=tokens)

    def snapshot(self, model: int) -> WorkerSnapshot:
        """The worker in a round; `model` is the number of its model. The same object while nothing
        changes, so that what it derives from its fields is computed once."""
        last, prefixes = self.last_snapshot, self.prefixes.sorted
        if (
            last is None
            or last.cost is not self.cost
            or last.prefixes is not prefixes
            or last.shared_blocks != self.shared_blocks
            or last.kv_tokens != self.room_tokens
            or last.max_running != self.slots
        ):
            last = self.last_snapshot = WorkerSnapshot(
                self.number,
                model,
                self.room_tokens,
                self.view.block_tokens,
                self.slots,
                self.view.reach_tokens,
                self.cost,
                self.shared_blocks,
                prefixes,
                self.view.adapter_slots,
                self.view.adapter_turn_steps,
            )
        return last

    @property
    def suspected(self) -> bool:
        """Whether it hangs, or has not yet dropped requests that continue elsewhere."""
        return self.silence.suspected or self.applied_seq < self.fence_seq

    @property
    def takes_requests(self) -> bool:
        return not (self.draining or self.suspected)

    @property
    def slots(self) -> int:
        """Running requests that the scheduler may have here: running orphans keep their slots. A
        reported limit pauses none: it may be older than the last plan, and at a worker that cannot
        pause, a paused answer is cut off."""
        reported = max(self.most_running or self.view.max_running, len(self.running))
        most = min(reported, self.view.max_running)
        if not self.orphans:
            return most
        return max(0, most - sum(held.running for held in self.orphans.values()))

    @property
    def room_tokens(self) -> int:
        """KV tokens that the scheduler may plan: device blocks of orphans are excluded."""
        if not self.orphans:
            return self.view.kv_tokens
        blocks = sum(held.blocks for held in self.orphans.values())
        return max(0, self.view.kv_tokens - blocks * self.view.block_tokens)

    @property
    def kv_blocks(self) -> int:
        return self.view.kv_tokens // self.view.block_tokens

    @property
    def free_share(self) -> float:
        """Of the KV tokens that the scheduler may plan, the share that the last round left free."""
        return 1.0 - (self.peak_tokens or 0.0) / max(1, self.room_tokens)

    @property
    def used_tokens(self) -> int:
        """KV tokens of the blocks in use, from its last report."""
        return (self.kv_blocks - self.free_blocks) * self.view.block_tokens

    def serves(self, request: Request) -> bool:
        return self.view.model == request.model

    def could_run(self, request: Request) -> bool:
        """Whether its model and its length fit, regardless of what runs there now."""
        total = request.prompt_tokens + request.max_tokens
        return self.serves(request) and total <= self.view.reach_tokens

    def apply_decision(self, decision: WorkerDecision) -> None:
        """Keeps the round's victims, and its expected peak if the round computed one."""
        self.victims = decision.victims
        if decision.peak_tokens or not len(decision.run):
            self.peak_tokens = decision.peak_tokens

    def update_orphans(self, report: Report) -> None:
        """Keeps orphans as the worker reports them: a later adoption needs their current state."""
        if not self.orphans:
            return
        for progress in (*report.progress, *report.evicted):
            if held := self.orphans.get(progress.request_id):
                self.orphans[progress.request_id] = replace(
                    held,
                    output_tokens=progress.output_tokens,
                    held_tokens=progress.held_tokens,
                    blocks=progress.blocks,
                    running=held.running and progress not in report.evicted,
                )
        for completion in report.finished:
            self.orphans.pop(completion.request_id, None)


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    view: WorkerView
    running: int
    held_tokens: int  # in blocks in use, from its last report


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers and the queue, for status lines and gateways."""

    workers: tuple[WorkerStatus, ...] = ()
    queued: int = 0
    drain_s: float = 0.0
    policy: str = ""
    prefix_blocks: int = 0  # leading prompt blocks: the scheduler places by their hashes

    def differs_from(self, sent: "Fleet") -> bool:
        """Whether the queue or its drain time is another by more than a tenth."""
        pairs = (self.queued, sent.queued), (self.drain_s, sent.drain_s)
        return any(abs(now - before) > 0.1 * max(now, before) for now, before in pairs)
