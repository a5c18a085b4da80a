"""EmulatedEngine: the real worker state, with a cost model in place of a device.

    settle copies → compose → draw from the table → sleep until the step's end → commit

Composition, KV accounting, budgets, evictions and reports are those of `WorkerState`, as in the
engine that computes. A step ends at the time that the cost model gives; its tokens are known
before. Commands are handled between two steps.
"""

from collections.abc import Callable

from services.costs import CostModel, Direction, StepTiming, SwapTiming
from services.worker.emulation.answers import Answers
from services.worker.emulation.pacing import Clock, MonotonicClock, StepPacer
from services.worker.engine.phase_clock import EnginePhase, PhaseClock
from services.worker.kv.swap_links import SwapLinks, TimedCopy
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import StepBatch, StepResult, TokenLogprobs
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt

NO_SCORES = (
    "an emulated engine does not score prompts: leave out prompt_logprobs, and echo with logprobs"
)
CERTAIN = 0.0  # the log-probability of a token from the table


class EmulatedEngine:
    """One replica of the emulated hardware.

    `phases` count the device's modelled time, not the thread's: whatever else passes while requests
    wait, the device is idle. Bytes of KV are unknown.
    """

    kv_bytes_per_token = 0
    host_block_bytes = 0

    def __init__(
        self,
        hardware: str,
        cost: CostModel,
        limits: Limits,
        answers: Answers,
        vocab_size: int,
        attends_padding: bool = False,
        clock: Clock | None = None,
    ):
        """`clock`: the system's if None."""
        self.state = WorkerState(limits)
        self.phases = PhaseClock()
        self._hardware, self._cost = hardware, cost
        self._answers, self._vocab_size = answers, vocab_size
        self._attends_padding = attends_padding
        self._pacer = StepPacer(clock or MonotonicClock(), hardware)
        self._links = SwapLinks(cost)
        self._copies: list[TimedCopy] = []  # in progress

    @property
    def placement(self) -> str:
        return f"emulated {self._hardware} (no model computes, answers are made up)"

    def enter_thread(self) -> None:
        """Needs no preparation."""

    def check(self) -> None:
        """Is never lost."""

    def close(self) -> None:
        """Has nothing to end."""

    def can_compute(self) -> bool:
        return True

    def prepare(self, prompt: Prompt, on_ready: Callable[[], None]) -> bool:
        """There is nothing to wait for."""
        return True

    def add(self, prompt: Prompt, now: float) -> str | None:
        """Adds a prompt. Returns why it can never run here, else None."""
        refusal = ""
        if field := prompt.beyond(self._vocab_size):
            refusal = f"{field} must lie in [0, {self._vocab_size})"
        elif prompt.sampling.prompt_logprobs is not None:
            refusal = NO_SCORES
        if refusal:
            self.state.refuse(prompt.request_id)
            return refusal
        return self.state.receive(prompt, now)

    def reset(self) -> None:
        """Drops all requests and pending copies."""
        self.state.reset()
        self._links = SwapLinks(self._cost)
        self._copies = []
        self._pacer.rest()

    def step(self) -> StepResult | None:
        """Sleeps through one step and returns its result; None if nothing can run."""
        start_s = self._pacer.begin()
        batch, copying_s = self._compose(start_s)
        while batch is None and (arrival_s := self._next_arrival_s()) is not None:
            self._count(EnginePhase.SWAP, arrival_s - start_s)
            start_s = self._pacer.wait(arrival_s)
            batch, copying_s = self._compose(start_s)
        if batch is None:
            self._pacer.rest()
            return None
        timing = self._time(batch, copying_s)
        drawn = [self._answers.draw(sequence) for sequence in batch.sampling]
        logprobs = _logprobs(batch, drawn)
        self._count(EnginePhase.MODEL, timing.elapsed_s)
        self._pacer.end(timing.elapsed_s)
        return self.state.steps.commit(batch, drawn, [timing], logprobs)

    def _compose(self, now: float) -> tuple[StepBatch | None, float]:
        """The next batch, and the device's part of the copies that are started before it."""
        self._settle(now)
        batch = self.state.steps.compose()
        moves = self.state.pop_moves()
        self._copies += self._links.start(moves, now)
        return batch, self._links.device_s(moves)

    def _settle(self, now: float) -> None:
        """Completes the copies that have ended."""
        if not self._copies:
            return
        ended = [copy for copy in self._copies if copy.end_s <= now]
        self._copies = [copy for copy in self._copies if copy.end_s > now]
        uploads = [copy for copy in ended if copy.transfer.direction is Direction.UPLOAD]
        self.state.complete_uploads(copy.transfer.serial for copy in uploads)
        self.state.record_swaps([self._timed(copy) for copy in ended if copy.transfer.tokens])

    def _timed(self, copy: TimedCopy) -> SwapTiming:
        """What a device's clock measures of a copy."""
        moved = copy.transfer
        device_s = moved.tokens * self._cost.quantize_token_s / 2
        link_s = copy.end_s - copy.start_s
        return SwapTiming(
            moved.direction, moved.tokens, link_s + device_s, device_s, moved.request_id
        )

    def _next_arrival_s(self) -> float | None:
        """When the next upload in progress arrives."""
        ends = (c.end_s for c in self._copies if c.transfer.direction is Direction.UPLOAD)
        return min(ends, default=None)

    def _time(self, batch: StepBatch, copying_s: float) -> StepTiming:
        """What the batch costs on the device."""
        prefill, rows, context = batch.prefill_tokens, len(batch.decodes), batch.context_tokens
        padding = self.state.padding_tokens if rows and self._attends_padding else 0
        elapsed_s = self._cost.step_s(prefill, rows, context + padding) + copying_s
        return StepTiming(prefill, rows, context, elapsed_s)

    def _count(self, phase: EnginePhase, elapsed_s: float) -> None:
        self.phases.seconds[phase] += elapsed_s


def _logprobs(batch: StepBatch, drawn: list[int]) -> dict[int, TokenLogprobs]:
    """Those of the requests that ask for them: each token is certain, and has no alternative."""
    return {
        row: TokenLogprobs(CERTAIN, (drawn[row],)[:asked], (CERTAIN,)[:asked])
        for row, sequence in enumerate(batch.sampling)
        if (asked := sequence.prompt.sampling.logprobs) is not None
    }
