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
from services.costs import CostModel, Direction
from services.forecast import Floats
from services.worker.kv.transfers import TransferPlan
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import NewToken, StepBatch
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence
from simulator.engine.events import Command, UploadEnd
from simulator.engine.records import WorkerUsage
from simulator.hardware.hardware import EOS, Hardware

MORE = 0  # any token that does not end an answer
MAX_STEPS = 4_096  # of one span


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
    """The tokens of a span's last step, and the rows that drew one in each step before it."""

    rows: list[str]
    times_s: Floats
    tokens: list[NewToken]


class SwapLinks:
    """The copy engines of one device: one direction each, one transfer after another."""

    def __init__(self, cost: CostModel):
        self._cost = cost
        self._free_s = {Direction.OFFLOAD: 0.0, Direction.UPLOAD: 0.0}
        self._stored_s: dict[str, float] = {}  # when a request's KV has reached host memory

    def start(self, plan: TransferPlan, now: float) -> list[tuple[float, UploadEnd]]:
        """Queues the transfers; returns when each upload ends. An upload waits until its KV has
        reached host memory."""
        uploads = []
        for transfer in plan.started:
            start_s = max(now, self._free_s[transfer.direction])
            match transfer.direction:
                case Direction.OFFLOAD:
                    end_s = start_s + transfer.tokens * self._cost.offload_token_s
                    self._stored_s[transfer.request_id] = end_s
                case Direction.UPLOAD:
                    start_s = max(start_s, self._stored_s.pop(transfer.request_id, 0.0))
                    end_s = start_s + transfer.tokens * self._cost.upload_token_s
                    uploads.append((end_s, UploadEnd(transfer.serial)))
            self._free_s[transfer.direction] = end_s
        return uploads

    def device_s(self, plan: TransferPlan) -> float:
        """The device's own part of the transfers, which delays the step."""
        return sum(t.tokens for t in plan.started) * self._cost.quantize_token_s / 2


class SimWorker:
    """One replica. `answer_tokens` gives the length of a request's answer."""

    def __init__(
        self,
        number: int,
        hardware: Hardware,
        answer_tokens: Callable[[str], int],
        jumps: bool,
        prefix_sharing: bool,
    ):
        self.number = number
        self.hardware = hardware
        self.usage = WorkerUsage()
        self.span: Span | None = None
        self.state = WorkerState(hardware.limits(prefix_sharing))
        self.state.attach()
        self._answer_tokens = answer_tokens
        self._jumps = jumps
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

    # Steps

    def begin(self, now: float) -> list[tuple[float, UploadEnd]]:
        """Handles commands and begins the next span, if there is anything to compute. Returns the
        uploads that it started and when they end."""
        self._handle_inbox(now)
        batch = self.state.steps.compose()
        transfers = self.state.pop_moves()
        uploads = self._links.start(transfers, now)
        if batch is not None:
            self._spans += 1
            ends_s = self._step_ends(batch, now, self._links.device_s(transfers))
            self.span = Span(self._spans, batch, now, ends_s)
        return uploads

    def _step_ends(self, batch: StepBatch, now: float, device_s: float) -> Floats:
        """When each step of the span ends. Summed one by one, so that a span and its single steps
        end at equal times. O(rows + steps)."""
        cost, rows = self.hardware.cost, len(batch.decodes)
        steps = 1 + (self._repeatable(batch) if self._jumps else 0)
        attended = batch.context_tokens + (self._attended_padding() if rows else 0)
        context = attended + rows * np.arange(steps, dtype=float)
        fixed_s = cost.base_s + cost.prefill_token_s * batch.prefill_tokens
        elapsed_s: Floats = fixed_s + cost.decode_seq_s * rows + cost.context_token_s * context
        elapsed_s[0] += device_s
        ends_s: Floats = np.cumsum(np.concatenate([[now], elapsed_s]))[1:]
        return ends_s

    def _attended_padding(self) -> int:
        return self.state.padding_tokens if self.hardware.attends_padding else 0

    def _repeatable(self, batch: StepBatch) -> int:
        most = min(self.state.steps.repeatable(batch), MAX_STEPS - 1)
        if most > 0:
            left = [self._answer_tokens(s.request_id) - s.output_tokens for s in _unended(batch)]
            most = min(most, min(left, default=1) - 1)
        return max(0, most)

    def finish(self) -> SpanResult:
        """Computes the span and returns its tokens."""
        span, self.span = self.span, None
        assert span is not None
        batch, repeats = span.batch, len(span.ends_s) - 1
        rows: list[str] = []
        if repeats:
            rows = [s.request_id for s in _unended(batch)]
            self.state.steps.repeat(batch, repeats, MORE)
            again = self.state.steps.compose()
            assert again is not None
            batch = again
        prefill = batch.prefill_tokens
        result = self.state.steps.commit(batch, [self._draw(s) for s in batch.sampling], [])
        pool = self.state.pool
        used = (pool.blocks - pool.free_blocks) * pool.block_tokens
        elapsed_s = span.end_s - span.began_s
        self.usage.on_span(span.end_s, elapsed_s, repeats + 1, len(batch.decodes), prefill, used)
        return SpanResult(rows, span.ends_s, result.tokens)

    def _draw(self, sequence: Sequence) -> int:
        left = self._answer_tokens(sequence.request_id) - sequence.output_tokens
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


def _unended(batch: StepBatch) -> list[Sequence]:
    """The decoding sequences without members that continue with their static batch."""
    return [sequence for sequence in batch.decodes.sequences if not sequence.ended]
