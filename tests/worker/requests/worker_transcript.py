"""A worker's state driven by hand, with one line per step."""

from collections.abc import Sequence
from textwrap import dedent
from typing import Any

from services.core import Grant, HeldRequest, Plan, QueueOrder, Report, RequestProgress
from services.costs import Direction
from services.worker.kv.transfers import TransferPlan
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import NewToken, StepBatch
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt, SamplingParams
from tests.worker.requests.worker_oracle import EOS, RuleDevice


class Account:
    """A scheduler's account of one device's blocks, from its reports alone."""

    def __init__(self, blocks: int):
        self._all = blocks
        self.blocks: dict[str, int] = {}

    def begin(self, held: Sequence[HeldRequest]) -> None:
        self.blocks = {request.request_id: request.blocks for request in held}

    def cancelled(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.blocks.pop(request_id, None)

    def check(self, report: Report) -> None:
        """Applies a report, which must add up."""
        self.cancelled(*(f.request_id for f in report.finished))
        self.blocks |= {p.request_id: p.blocks for p in (*report.progress, *report.evicted)}
        in_use = sum(self.blocks.values()) - report.shared_blocks
        assert in_use + report.free_blocks == self._all, (self.blocks, report)


class Transcript:
    """Drives a state and writes down what it does. Blocks have 4 tokens."""

    def __init__(self, kv_tokens: int = 64, **limits: int):
        shape: dict[str, Any] = {
            "max_batch_tokens": 8,
            "report_every_steps": 100,
            "prefix_sharing": False,
        }
        shape |= limits
        self.state = WorkerState(
            Limits(kv_tokens // 4, block_tokens=4, eos_ids=frozenset([EOS]), **shape)
        )
        self.device = RuleDevice(block_tokens=4)
        self.account = Account(self.state.limits.kv_blocks)
        self.lines: list[str] = []
        self.listened = True  # by a scheduler
        self._seq = 0

    def prompt(
        self, request_id: str, length: int, max_tokens: int = 9, salt: str = "", **sampling: Any
    ) -> None:
        how = SamplingParams(**{"temperature": 0, "ignore_eos": True, **sampling})
        tokens = tuple(range(1, length + 1))
        prompt = Prompt(request_id, tokens, length, max_tokens, how, cache_salt=salt)
        if refusal := self.state.receive(prompt, now=0.0):
            self.lines.append(f"refused {request_id}: {refusal}")

    def plan(self, seq: int = 0, **directives: Any) -> None:
        self._seq = seq or self._seq + 1
        reported: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in directives.items()
        }
        plan = Plan(self._seq, **reported)
        self.state.apply_plan(plan, now=0.0)
        self.account.cancelled(*(r for r in plan.cancel if r not in self.state.sequences))
        self.state.check_integrity()

    def admit(self, **limits: int) -> None:
        self.plan(admit=[Grant(request_id, limit) for request_id, limit in limits.items()])

    def detach(self, *unsent: Report) -> None:
        """The scheduler is gone, and these reports did not reach it."""
        self.listened = False
        self.state.return_reports(unsent)

    def attach(self) -> None:
        """Another scheduler attaches; its plans are numbered from 1."""
        held = self.state.attach()
        self.listened, self._seq = True, 0
        self.account.begin(held)
        self.state.check_integrity()
        self.lines += ["hello", *(f"  has {_holds(request)}" for request in held)]
        self._report()

    def step(self, drawn: dict[str, int] | None = None, times: int = 1, poison: str = "") -> None:
        """Steps with one of `poison` (one letter per request) fail."""
        for _ in range(times):
            batch = self.state.steps.compose()
            self._carry_out(self.state.pop_moves())
            if batch is None:
                self.lines.append("nothing runs")
            elif any(s.request_id in poison for s in batch.sequences):
                how, failed = ran(batch), self.state.steps.fail(batch)
                self.lines.append(" ".join([how, "breaks", *(s.request_id for s in failed)]))
            else:
                how, tokens = ran(batch), self.device.run(batch)
                for row, sequence in enumerate(batch.sampling):
                    tokens[row] = (drawn or {}).get(sequence.request_id, 7)
                result = self.state.steps.commit(batch, tokens, [])
                self.lines.append(f"{how} -> {' '.join(map(drew, result.tokens)) or '-'}")
            self.state.check_integrity()
            self._report()

    def _carry_out(self, moves: TransferPlan) -> None:
        self.device.carry_out(moves)
        self.lines += [f"  recalled {serial}" for serial in moves.recalled]
        for move in moves.started:
            way = "to host" if move.direction is Direction.OFFLOAD else f"back as {move.serial}"
            blocks = len(move.device_blocks)
            self.lines.append(f"  {move.request_id}: {move.tokens} in {blocks} blocks {way}")

    def arrive(self) -> None:
        """Completes all uploads."""
        self._carry_out(self.state.pop_moves())
        serials = list(self.device.pending)
        for serial in serials:
            self.device.finish(serial)
        self.state.complete_uploads(serials)
        self.state.check_integrity()

    def rank(self, residency: str, waits_s: dict[str, float], **directives: Any) -> None:
        """A plan with this order of requests and their expected waits."""
        order = QueueOrder.of(waits_s.items())
        self.plan(order=order, residency=residency, **directives)

    def _report(self) -> None:
        if self.listened and (report := self.state.report()):
            self.account.check(report)
            self.lines.append("  " + _said(report))

    def reads(self, text: str) -> None:
        """The lines since the last call."""
        self._report()
        lines, self.lines = self.lines, []
        assert lines == dedent(text).strip("\n").splitlines()


def ran(batch: StepBatch) -> str:
    positions = batch.decodes.positions.tolist()
    rows = zip(batch.decodes.sequences, positions, strict=True)
    decodes = [f"{sequence.request_id}@{position}" for sequence, position in rows]
    names = [c.sequence.request_id.replace("\0padding", "~pad") for c in batch.chunks]
    chunks = [f"{name}[{c.start}:{c.end}]" for name, c in zip(names, batch.chunks, strict=True)]
    return " ".join([*decodes, *chunks])


def drew(token: NewToken) -> str:
    return f"{token.request_id}+{token.offset}" + (f"={token.finish}" if token.finish else "")


def _holds(held: HeldRequest) -> str:
    way = "runs" if held.running else "waits"
    return (
        f"{held.request_id}:{held.output_tokens}/{held.held_tokens} in {held.blocks} "
        f"{way} to {held.limit_tokens} of {held.max_tokens}"
    )


def _said(report: Report) -> str:
    parts = [f"{p.request_id}:{p.output_tokens}/{p.held_tokens}" for p in report.progress]
    parts += [f"finished {f.request_id}:{f.output_tokens} {f.reason}" for f in report.finished]
    parts += [f"evicted {p.request_id}:{p.output_tokens}{_rests(p)}" for p in report.evicted]
    message = ", ".join(parts) or "-"
    shared = f", shared {report.shared_blocks}" if report.shared_blocks else ""
    return f"report plan {report.applied_plan_seq}, free {report.free_blocks}{shared}: {message}"


def _rests(progress: RequestProgress) -> str:
    return f" ({progress.held_tokens} rest)" if progress.held_tokens else ""
