"""A worker in virtual time: the served worker's state, with a cost model in place of a device.

    commands → `begin` a span of steps → … → `finish` it → report

A span is one step, or several decode steps between which nothing happens: no answer ends, no budget
is used up, no report is due, and memory suffices. Its steps end at known times, so a command that
arrives within it cuts it at the end of the step in progress. With `jumps` off every span is one
step; both ways give equal results.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.core import Plan, Report
from services.costs import Direction, StepTiming
from services.forecast import Floats, Ints
from services.worker.kv.swap_links import SwapLinks
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import DecodeRows, NewToken, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence
from simulator.engine.events import Command, UploadEnd
from simulator.engine.records import WorkerUsage
from simulator.hardware.hardware import EOS, Hardware

MORE = 0  # any token that does not end an answer
MAX_STEPS = 4_096  # of one span
NO_ROWS: Ints = np.zeros(0, np.int64)


@dataclass(slots=True)
class Span:
    """Steps in progress: their batch, and the time at which each ends."""

    number: int
    batch: StepBatch
    began_s: float
    ends_s: Floats

    @property
    def end_s(self) -> float:
        return float(self.ends_s[-1])


@dataclass(frozen=True, slots=True)
class SpanResult:
    """What a span drew: its decode rows one token at each of `times_s`, the requests of `drawn`
    one at its end. `rows` and `drawn` are rows of the workload. `tokens` are those that end a
    request, among others."""

    rows: Ints
    times_s: Floats
    drawn: Ints
    tokens: list[NewToken]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """`jumps`: equal steps are computed at once. `prefix_sharing`: prompts have tokens, and share
    equal beginnings. `timed`: reports have the time of each step, as served."""

    jumps: bool = True
    prefix_sharing: bool = False
    timed: bool = False


class SimWorker:
    """One replica. `end_lengths` are those of each request's prompt and whole answer."""

    def __init__(
        self,
        number: int,
        hardware: Hardware,
        end_lengths: Ints,
        options: WorkerOptions,
        slowdown: Callable[[float], float] | None = None,
    ):
        """`slowdown`: a factor of the steps that begin at a time."""
        self.number = number
        self.hardware = hardware
        self.usage = WorkerUsage()
        self.span: Span | None = None
        self.state = WorkerState(hardware.limits(options.prefix_sharing))
        self.state.attach()
        self._end_lengths = end_lengths
        self._known_rows: DecodeRows | None = None
        self._known = (NO_ROWS, NO_ROWS)
        self._options = options
        self._slowdown = slowdown
        self._inbox: list[Command] = []
        self._links = SwapLinks(hardware.cost)
        self._spans = 0

    # Commands

    def receive(self, command: Command, now: float) -> Span | None:
        """Keeps a command until the step in progress ends. Returns the span if it now ends
        earlier."""
        self._inbox.append(command)
        span = self.span
        if span is None:
            return None
        steps = int(np.searchsorted(span.ends_s, now)) + 1
        if steps >= len(span.ends_s):
            return None
        self._spans += 1
        span.number, span.ends_s = self._spans, span.ends_s[:steps]
        return span

    def _handle_inbox(self, now: float) -> None:
        for command in self._inbox:
            match command:
                case Plan():
                    self.state.apply_plan(command, now)
                    self.usage.on_batches([len(each.members) for each in command.batches])
                case Prompt():
                    self.state.receive(command, now)
                case UploadEnd():
                    self.state.complete_uploads([command.serial])
        self._inbox.clear()

    def kv_tokens_at(self, now: float) -> tuple[int, int]:
        """KV tokens in use within the span in progress, and those of running requests, both in
        whole blocks, shared ones counted once. O(running), or their blocks if any is shared."""
        pool, size = self.state.pool, self.state.pool.block_tokens
        used = pool.blocks - pool.free_blocks
        tables = [pool.table(name) for name in self.state.running]
        running = len(set().union(*tables)) if pool.shared_blocks else sum(map(len, tables))
        made = int(np.searchsorted(self.span.ends_s, now, side="right")) if self.span else 0
        grown = 0
        if self.span and made:  # the span's earlier steps have no prefill
            grown = sum(
                pool.blocks_for(len(s.tokens) + made) - len(pool.table(s.request_id))
                for s in self.span.batch.decodes.sequences
            )
        return (used + grown) * size, (running + grown) * size

    # Steps

    def begin(self, now: float) -> list[tuple[float, UploadEnd]]:
        """Handles commands and begins the next span, if there is anything to compute. Returns the
        uploads that it started and when they end."""
        self._handle_inbox(now)
        batch = self.state.steps.compose()
        transfers = self.state.pop_moves()
        copies = self._links.start(transfers, now)
        if batch is not None:
            self._spans += 1
            ends_s = self._step_ends(batch, now, self._links.device_s(transfers))
            self.span = Span(self._spans, batch, now, ends_s)
        return [
            (copy.end_s, UploadEnd(copy.transfer.serial))
            for copy in copies
            if copy.transfer.direction is Direction.UPLOAD
        ]

    def _step_ends(self, batch: StepBatch, now: float, device_s: float) -> Floats:
        """When each step of the span ends. Summed one by one, so that a span and its single steps
        end at equal times. O(rows + steps)."""
        cost, rows = self.hardware.cost, len(batch.decodes)
        steps = 1 + (self._repeatable(batch) if self._options.jumps else 0)
        attended = batch.context_tokens + (self._attended_padding() if rows else 0)
        context = attended + rows * np.arange(steps, dtype=float)
        fixed_s = cost.base_s + cost.prefill_token_s * batch.prefill_tokens
        ends_s = np.empty(1 + steps)
        ends_s[0], elapsed_s = now, ends_s[1:]
        elapsed_s[:] = fixed_s + cost.decode_seq_s * rows + cost.context_token_s * context
        if self._slowdown:
            elapsed_s *= self._slowdown(now)
        elapsed_s[0] += device_s
        return ends_s.cumsum()[1:]

    def _attended_padding(self) -> int:
        return self.state.padding_tokens if self.hardware.attends_padding else 0

    def _repeatable(self, batch: StepBatch) -> int:
        """How many steps beyond the first are computed with it: up to the first end."""
        most = min(self.state.runs.repeatable(batch), MAX_STEPS - 1)
        if most > 0:
            most = min(most, self._fewest_left(batch) - 1)
        return max(0, most)

    def _fewest_left(self, batch: StepBatch) -> int:
        """The fewest tokens left of a decoding request that has not ended."""
        rows = batch.decodes
        if self.state.runs.commits_at_once:
            _, ends = self._columns(rows)
            return int((ends - rows.positions).min()) - 1
        lengths = self._end_lengths
        left = (int(lengths[int(s.request_id)]) - len(s.tokens) for s in _unended(batch))
        return min(left, default=1)

    def _columns(self, rows: DecodeRows) -> tuple[Ints, Ints]:
        """The rows of the workload of these requests, and the lengths at which they are complete.
        Kept while the same requests decode."""
        if rows is not self._known_rows:
            numbers = np.array([int(s.request_id) for s in rows.sequences], np.int64)
            self._known_rows = rows
            self._known = numbers, self._end_lengths[numbers]
        return self._known

    def finish(self) -> SpanResult:
        """Computes the span and returns its tokens."""
        span, self.span = self.span, None
        assert span is not None
        batch, steps = span.batch, len(span.ends_s)
        prefill = batch.prefill_tokens
        options = self._options
        at_once = options.jumps and not options.timed and self.state.runs.commits_at_once
        if at_once:
            self.state.runs.compute(batch, steps, MORE)
        elif steps > 1:
            batch = self._repeat(batch, steps - 1)
        pool = self.state.pool
        used = (pool.blocks - pool.free_blocks) * pool.block_tokens
        elapsed_s = span.end_s - span.began_s
        result = self._commit_computed(span) if at_once else self._commit(span, batch)
        self.usage.on_span(span.end_s, elapsed_s, steps, len(batch.decodes), prefill, used)
        return result

    def _repeat(self, batch: StepBatch, times: int) -> StepBatch:
        """Computes all steps of a span but the last; returns the batch of the last."""
        self.state.runs.repeat(batch, times, MORE)
        last = self.state.steps.compose()
        assert last is not None
        return last

    def _commit(self, span: Span, last: StepBatch) -> SpanResult:
        """Commits the last step of a span as an engine does, token by token."""
        rows = NO_ROWS
        if len(span.ends_s) > 1:
            rows = np.array([int(s.request_id) for s in _unended(span.batch)], np.int64)
        timings = _step_timings(span) if self._options.timed else []
        draws = [self._draw(sequence) for sequence in last.sampling]
        tokens = self.state.steps.commit(last, draws, timings).tokens
        drawn = np.array([int(token.request_id) for token in tokens], np.int64)
        return SpanResult(rows, span.ends_s[:-1], drawn, tokens)

    def _commit_computed(self, span: Span) -> SpanResult:
        """Commits a span of computed steps. Only requests that end, stop or begin are handled one
        by one. Equal to single steps."""
        batch, steps, rows = span.batch, len(span.ends_s), span.batch.decodes
        lengths, count = rows.positions + 1 + steps, len(rows)
        numbers, ends = self._columns(rows)
        answered = ends == lengths
        stops = self.state.runs.limit_lengths(rows) == lengths
        last = {
            row: EOS if answered[row] else MORE for row in (answered | stops).nonzero()[0].tolist()
        }
        begun = batch.sampling[count:]  # each has its first token
        for row, sequence in enumerate(begun, count):
            whole = len(sequence.tokens) == self._end_lengths[int(sequence.request_id)]
            last[row] = EOS if whole else MORE
        drawn = np.array([int(s.request_id) for s in begun], np.int64)
        tokens = self.state.runs.commit(batch, steps, last)
        return SpanResult(numbers, span.ends_s, drawn, tokens)

    def _draw(self, sequence: Sequence) -> int:
        """The next token of a request."""
        left = self._end_lengths[int(sequence.request_id)] - len(sequence.tokens)
        return EOS if left == 1 else MORE

    def total_usage(self) -> WorkerUsage:
        """The usage until now, with the prefix cache's hits and the waste of static batches."""
        counters = self.state.counters
        self.usage.prefix_asked_tokens = counters.prefix_asked_tokens
        self.usage.prefix_hit_tokens = counters.prefix_hit_tokens
        self.usage.padding_tokens = counters.padding_tokens
        self.usage.invalid_tokens = counters.invalid_tokens
        return self.usage

    def pop_late(self) -> list[NewToken]:
        """Last tokens of static batches that ended between two steps."""
        return self.state.ends.pop_late()

    def report(self) -> Report | None:
        """What the scheduler must know, if anything."""
        return self.state.report()


def _step_timings(span: Span) -> list[StepTiming]:
    """What a served worker measures of the span's steps. O(steps)."""
    batch, rows = span.batch, len(span.batch.decodes)
    elapsed_s = np.diff(span.ends_s, prepend=span.began_s).tolist()
    return [
        StepTiming(batch.prefill_tokens, rows, batch.context_tokens + step * rows, each_s)
        for step, each_s in enumerate(elapsed_s)
    ]


def _unended(batch: StepBatch) -> list[Sequence]:
    """The decoding sequences without members that continue with their static batch."""
    return [sequence for sequence in batch.decodes.sequences if not sequence.ended]
