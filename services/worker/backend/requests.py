"""BackendRequests: the requests of a worker in front of a server, from plan and prompt to end.

It is the counterpart of `requests.state.WorkerState` where tokens arrive whenever a server sends
them, instead of step by step. Pure: `pop_changes` says which requests begin and cease to run.

A server keeps no KV of a request that is cut off: a paused one is continued from its tokens. It
cannot stop at a budget either: tokens beyond a budget wait here, and once `SURPLUS_MAX` wait, the
request is cut off until its budget grows.

An answer that follows a grammar can only begin anew, so that no plan cuts it off: all that the
server sends waits here until its budget grows, or a plan admits it again.
"""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.core import FinishReason, Grant, HeldRequest, Pause, Plan, Report
from services.costs import StepTiming
from services.worker.requests.pending import ExpectedCancels, PendingRequests
from services.worker.requests.reporting import Reporter
from services.worker.requests.types.batch import NewToken, TokenLogprobs
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence, SequencePhase

SURPLUS_MAX = 64  # tokens of one request beyond its budget: a plan is on its way meanwhile


NO_CHANGES: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


class NoPrefixes:
    """The prefixes that a server caches are not known."""

    def pop_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return NO_CHANGES


class CountedPool:
    """A server's blocks. It may share some between requests, and have further clients: the count
    says what the requests of this worker take."""

    shared_blocks = 0
    cached = NoPrefixes()

    def __init__(self, kv_blocks: int, count_used: Callable[[], int]):
        self._kv_blocks = kv_blocks
        self._count_used = count_used

    @property
    def free_blocks(self) -> int:
        return max(0, self._kv_blocks - self._count_used())


class HeldBlocks:
    """Sequences by request, and the blocks of those that run."""

    def __init__(self, limits: Limits):
        self._block_tokens = limits.block_tokens
        self.sequences: dict[str, Sequence] = {}
        self.running: dict[str, Sequence] = {}
        self.pool = CountedPool(limits.kv_blocks, lambda: sum(self.blocks().values()))

    def blocks(self) -> dict[str, int]:
        """Blocks of each running request. O(running)."""
        size = self._block_tokens
        return {r: -(-len(s.tokens) // size) for r, s in self.running.items()}

    def start(self, sequence: Sequence) -> None:
        self.sequences[sequence.request_id] = sequence
        self.run(sequence)

    def run(self, sequence: Sequence) -> None:
        sequence.phase = SequencePhase.RUNNING
        self.running[sequence.request_id] = sequence

    def park(self, sequence: Sequence) -> None:
        """Keeps its tokens only."""
        sequence.phase, sequence.computed = SequencePhase.PARKED, 0
        self.running.pop(sequence.request_id, None)

    def forget(self, request_id: str) -> None:
        self.sequences.pop(request_id, None)
        self.running.pop(request_id, None)


class Arrival(NamedTuple):
    """A token from the server; `reason` if it ends the answer, as the server reports."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Changes:
    """`cut` are running at the server and must not any more; `begin` must."""

    cut: tuple[str, ...] = ()
    begin: tuple[Sequence, ...] = ()


class BackendRequests:
    """All requests here. A running one is at the server unless its budget is used up."""

    def __init__(self, limits: Limits):
        self._at_server: dict[str, Sequence] = {}
        self.restart(limits)

    def restart(self, limits: Limits) -> None:
        """Drops everything; requests at the server are cut by the next changes. From now on the
        server has these limits."""
        self.limits = limits
        self.pending = PendingRequests()
        self.held = HeldBlocks(self.limits)
        self._expected_cancels = ExpectedCancels()
        self._reporter = Reporter(every_steps=1)
        self._surplus: dict[str, deque[Arrival]] = {}
        self.used_blocks = 0  # at the last changes: other threads may read it

    @property
    def running(self) -> Mapping[str, Sequence]:
        """Requests that may run."""
        return self.held.running

    @property
    def at_server(self) -> int:
        """Number of requests that run at the server."""
        return len(self._at_server)

    def is_drained(self, now: float) -> bool:
        """Whether no request runs, or was just admitted before its prompt arrived."""
        return not (self.running or self.pending.awaits_prompt(now))

    def pop_changes(self) -> Changes:
        """What must change at the server since the last call. O(requests)."""
        wanted = {r: s for r, s in self.running.items() if s.within_budget and self._has_room(s)}
        known = self._at_server
        cut = tuple(r for r, s in known.items() if self._is_over(r, s))
        begin = tuple(s for r, s in wanted.items() if known.get(r) is not s)
        self._at_server = {r: s for r, s in known.items() if r not in cut}
        self._at_server |= {s.request_id: s for s in begin}
        self.used_blocks = sum(self.held.blocks().values())
        return Changes(cut, begin)

    def _is_over(self, request_id: str, sequence: Sequence) -> bool:
        """Whether the server must not go on with it. One that has used up its budget goes on while
        its surplus has room."""
        here = self.held.sequences if sequence.constrained else self.running
        return here.get(request_id) is not sequence or not self._has_room(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        surplus = self._surplus.get(sequence.request_id)
        if not surplus:
            return True
        has_room = sequence.constrained or len(surplus) < SURPLUS_MAX
        return surplus[-1].reason is None and has_room

    # Prompts and plans

    def receive(self, prompt: Prompt, now: float) -> str:
        """Accepts a prompt, before or after the plan that admits it. Returns why it can never run
        here, in which case it is reported as an ERROR; else an empty text. A request that is
        already here restarts after the delivered tokens of the prompt."""
        if prompt.request_id in self.held.sequences:
            self._forget(prompt.request_id)
            self._expected_cancels.expect(prompt.request_id)
        if why := self.limits.refusal(prompt):
            self.refuse(prompt.request_id)
            return why
        limit_tokens = self.pending.add_prompt(prompt, now)
        if limit_tokens is not None:
            self.held.start(Sequence.start(prompt, limit_tokens))
        return ""

    def apply_plan(self, plan: Plan, now: float) -> list[NewToken]:
        """Applies a plan, and returns tokens that waited for its budgets. A plan with a seq that
        was applied before changes nothing. What a server cannot do is left out: it keeps no KV of
        paused requests, and begins the members of a static batch one by one."""
        if plan.seq <= self._reporter.applied_plan_seq:
            return []
        for request_id in plan.cancel:
            self.cancel(request_id)
        for pause in plan.pause:
            self._pause(pause)
        for grant in plan.admit:
            self._admit(grant, now)
        for grant in plan.extend:
            self._extend(grant)
        self._reporter.record_plan(plan.seq)
        granted = (self._release(grant.request_id) for grant in (*plan.admit, *plan.extend))
        return [token for tokens in granted for token in tokens]

    def cancel(self, request_id: str) -> None:
        """Forgets a request; ignores an unknown one."""
        if self._expected_cancels.pop(request_id):
            return
        self._forget(request_id)
        self.pending.forget(request_id)

    def refuse(self, request_id: str) -> None:
        """Reports a request that cannot begin as an ERROR, and drops an earlier placement of it."""
        self._forget(request_id)
        self.pending.forget(request_id)
        self._reporter.record_completion(request_id, 0, FinishReason.ERROR)

    def expire(self, now: float) -> None:
        """Drops prompts and admissions that waited too long for each other."""
        for request_id in self.pending.expire(now):
            self._reporter.record_completion(request_id, 0, FinishReason.ERROR)

    def _admit(self, grant: Grant, now: float) -> None:
        sequence = self.held.sequences.get(grant.request_id)
        if sequence is None:
            prompt = self.pending.admit(grant.request_id, grant.limit_tokens, now)
            if prompt:
                self.held.start(Sequence.start(prompt, grant.limit_tokens))
            return
        sequence.limit_length = sequence.prompt_tokens + grant.limit_tokens
        if sequence.phase is not SequencePhase.RUNNING:
            self.held.run(sequence)
            self._reporter.forget(grant.request_id)  # its eviction is outdated

    def _extend(self, grant: Grant) -> None:
        self.pending.extend(grant.request_id, grant.limit_tokens)
        if sequence := self.held.sequences.get(grant.request_id):
            limit = sequence.prompt_tokens + grant.limit_tokens
            sequence.limit_length = max(sequence.limit_length, limit)

    def _pause(self, pause: Pause) -> None:
        sequence = self.held.sequences.get(pause.request_id)
        if sequence and sequence.phase is SequencePhase.RUNNING:
            self.held.park(sequence)
            self._reporter.include(sequence)

    # What the server sends

    def add(self, request_id: str, arrivals: Iterable[Arrival]) -> list[NewToken]:
        """Takes tokens of a request that runs at the server. Returns those within its budget; the
        last one may end it. What a server sends of a request that is not here any more is left out.
        """
        if request_id not in self.held.sequences:
            return []
        self._surplus.setdefault(request_id, deque()).extend(arrivals)
        return self._release(request_id)

    def evict(self, request_id: str) -> None:
        """The server gave up a request: it waits without KV until a plan admits it again."""
        sequence = self.running.get(request_id)
        if sequence is not None:
            self.held.park(sequence)
            self._reporter.record_eviction(sequence)
        self._at_server.pop(request_id, None)

    def fail(self, request_id: str) -> Sequence | None:
        """Ends a request that the server cannot answer; None if it is gone already."""
        sequence = self.held.sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ERROR)
        return sequence

    def _release(self, request_id: str) -> list[NewToken]:
        """Moves tokens from the surplus to the output, up to the budget."""
        sequence, surplus = self.held.sequences.get(request_id), self._surplus.get(request_id)
        if sequence is None or not surplus or sequence.phase is not SequencePhase.RUNNING:
            return []
        released = []
        while surplus and sequence.within_budget:
            released.append(token := self._append(sequence, surplus.popleft()))
            if token.finish is not None:
                self._end(sequence, token.finish)
                return released
        if released and not sequence.within_budget:
            self._reporter.include(sequence)
        return released

    def _append(self, sequence: Sequence, arrival: Arrival) -> NewToken:
        offset = len(sequence.tokens) - sequence.prompt_tokens
        sequence.tokens.append(arrival.token_id)
        sequence.computed = len(sequence.tokens) - 1
        local = sequence.finish_reason(arrival.token_id, self.limits.eos_ids)
        opening = None if sequence.opened else sequence.open()
        return NewToken(
            sequence.prompt.origin,
            sequence.request_id,
            offset,
            arrival.token_id,
            local or arrival.reason,
            arrival.logprobs,
            opening,
        )

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        self._forget(sequence.request_id)
        self._expected_cancels.discard(sequence.request_id)
        output = len(sequence.tokens) - sequence.prompt_tokens
        self._reporter.record_completion(sequence.request_id, output, reason)

    def _forget(self, request_id: str) -> None:
        """Drops a request. One at the server is cut by the next changes."""
        self.held.forget(request_id)
        self._surplus.pop(request_id, None)
        self._reporter.forget(request_id)

    # The scheduler

    def attach(self) -> tuple[HeldRequest, ...]:
        """Attaches a scheduler. Returns all requests here, which it adopts by plans or cancels."""
        self._expected_cancels.clear()
        for prompt in self.pending.pop_prompts():
            sequence = Sequence.start(prompt, prompt.delivered_tokens)
            self.held.start(sequence)
            self.held.park(sequence)
        blocks = self.held.blocks()
        self._reporter.begin(self.held.sequences, blocks)
        return tuple(s.held(blocks.get(r, 0)) for r, s in self.held.sequences.items())

    def return_reports(self, reports: Collection[Report]) -> None:
        """Puts the ends and evictions of reports that were not sent into the next one."""
        self._reporter.restore(reports, self._parked)

    def _parked(self, request_id: str) -> Sequence | None:
        sequence = self.held.sequences.get(request_id)
        return sequence if sequence and sequence.phase is SequencePhase.PARKED else None

    def keep_only(self, origins: Container[str]) -> None:
        """Drops requests of other gateway streams, because their tokens cannot be delivered."""
        here = [s.prompt for s in self.held.sequences.values()]
        for request_id in self.pending.of_other_origins(here, origins):
            self._forget(request_id)
            self.pending.forget(request_id)

    def record_interval(self, timings: Iterable[StepTiming]) -> None:
        """Makes the next report include the progress of all requests."""
        self._reporter.record_step(timings)

    def report(self, max_running: int) -> Report | None:
        """What happened since the last report; None if nothing did. `max_running`: how many
        requests may run at present."""
        report = self._reporter.next_report(self.held)
        return replace(report, max_running=max_running) if report else None
