"""The engine's loop over a worker's state without a model: a device that answers by rule."""

from collections.abc import Callable

from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import NewToken, StepBatch
from services.worker.requests.types.sequence import Sequence
from tests.worker.requests.worker_oracle import RuleDevice, scores_of

Flight = tuple[StepBatch, list[int], bool]  # its draws, and whether it fails


class RuleLoop:
    """With `overlap`, a step is in flight between two calls of `step`. Steps that `breaks` selects
    fail when they are awaited, and so does a step launched behind them; with `early`, they fail at
    launch."""

    def __init__(
        self,
        state: WorkerState,
        device: RuleDevice,
        overlap: bool,
        early: bool = False,
        breaks: Callable[[StepBatch], bool] = lambda _: False,
    ):
        self.state = state
        self.device = device
        self.overlap = overlap
        self.early = early
        self.breaks = breaks
        self.compose: Callable[[], StepBatch | None] = state.steps.compose
        self.failed: list[Sequence] = []  # ended by the last failed step
        self._flight: Flight | None = None

    def step(self) -> list[NewToken] | None:
        """The result of one iteration; None when nothing can run."""
        launched = self._flight or self._launch()
        self._flight = None
        if launched is None:
            return None
        batch, drawn, broken = launched
        if broken and not self.state.steps.in_flight and (self.early or not self.overlap):
            return self._fail(batch)
        ahead = self._launch_behind(launched) if self.overlap else None
        if broken:
            return self._fail(batch)
        scores = [scores_of(chunk) for chunk in batch.scored]
        result = self.state.steps.commit(batch, drawn, [], scores=scores)
        if ahead:
            self.state.steps.advance(ahead[0])
            self._flight = ahead
        return result.tokens

    def _launch_behind(self, launched: Flight) -> Flight | None:
        if not self.state.steps.in_flight:
            self.state.steps.advance(launched[0])
        ahead = self._launch(behind_broken=launched[2])
        if ahead and ahead[2] and self.early:
            self.state.steps.withdraw()
            return None
        return ahead

    def _launch(self, behind_broken: bool = False) -> Flight | None:
        batch = self.compose()
        self.state.check_integrity()
        self.device.place(self.state.steps.adapter_slots.pop_placements())
        self.device.carry_out(self.state.pop_moves())
        if batch is None:
            return None
        broken = behind_broken or self.breaks(batch)
        return batch, self.device.run(batch, broken), broken

    def _fail(self, batch: StepBatch) -> list[NewToken]:
        self.failed = self.state.steps.fail(batch)
        self.state.check_integrity()
        return []
