"""What a worker has to tell the scheduler, collected between reports."""

from collections import deque
from collections.abc import Iterable

from services.core import Completion, FinishReason, Progress, Report, StepTiming, SwapTiming
from services.worker.sequence import Sequence

TIMINGS_MAX = 64  # a report carries the latest; the estimator needs samples, not a ledger


class Reporter:
    """Events at once; everybody's progress every `every_steps` steps and after each plan."""

    def __init__(self, every_steps: int):
        self._every_steps = every_steps
        self._seq = 0
        self._steps = 0
        self.applied_plan_seq = 0
        self._finished: list[Completion] = []
        self._evicted: list[Progress] = []
        self._told: dict[str, Sequence] = {}
        self._timings: deque[StepTiming] = deque(maxlen=TIMINGS_MAX)
        self._swaps: deque[SwapTiming] = deque(maxlen=TIMINGS_MAX)
        self._everybody = False

    def stepped(self, timing: StepTiming) -> None:
        self._steps += 1
        self._timings.append(timing)

    def swapped(self, timings: Iterable[SwapTiming]) -> None:
        self._swaps.extend(timings)

    def planned(self, plan_seq: int) -> None:
        self.applied_plan_seq = plan_seq
        self._everybody = True

    def finished(self, request_id: str, output_tokens: int, reason: FinishReason) -> None:
        self._told.pop(request_id, None)
        self._finished.append(Completion(request_id, output_tokens, reason))

    def evicted(self, progress: Progress) -> None:
        self._told.pop(progress.request_id, None)
        self._evicted.append(progress)

    def tell(self, sequence: Sequence) -> None:
        """Its progress in the next report: its slice ended, or it was paused."""
        self._told[sequence.request_id] = sequence

    def forget(self, request_id: str) -> None:
        """Say nothing more of a cancelled request."""
        self._told.pop(request_id, None)

    def take(self, running: Iterable[Sequence], free_tokens: int) -> Report | None:
        """The next report, if there is anything to say."""
        everybody = self._everybody or self._steps >= self._every_steps
        if not (everybody or self._finished or self._evicted or self._told):
            return None
        self._seq += 1
        about = ({s.request_id: s for s in running} if everybody else {}) | self._told
        report = Report(
            seq=self._seq,
            applied_plan_seq=self.applied_plan_seq,
            progress=tuple(sequence.progress() for sequence in about.values()),
            finished=tuple(self._finished),
            evicted=tuple(self._evicted),
            free_tokens=free_tokens,
            timings=tuple(self._timings),
            swaps=tuple(self._swaps),
        )
        self._clear(everybody)
        return report

    def _clear(self, everybody: bool) -> None:
        self._finished.clear()
        self._evicted.clear()
        self._told.clear()
        self._timings.clear()
        self._swaps.clear()
        if everybody:
            self._everybody = False
            self._steps = 0
