"""Collects what the worker reports to the scheduler."""

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Protocol

from services.core import Completion, FinishReason, Report, RequestProgress
from services.costs import StepTiming, SwapTiming

TIMINGS_MAX = 64  # a report has the latest; the estimator needs samples, not all
NEW_SWAPS_MAX = 1_024  # between two steps; of more, the latest are kept
FINISHED_MAX = 16_384  # without a scheduler: more than all prompts and requests together


class Reported(Protocol):
    """A request, as reports show it."""

    @property
    def request_id(self) -> str: ...

    def progress(self, blocks: int) -> RequestProgress:
        """Its progress, with this many device blocks."""


class PrefixChanges(Protocol):
    def pop_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Hashes of blocks that became, and that ceased to be, shareable since the last call."""


class ReportedPool(Protocol):
    @property
    def free_blocks(self) -> int: ...

    @property
    def shared_blocks(self) -> int: ...

    @property
    def cached(self) -> PrefixChanges: ...


class ReportedMemory(Protocol):
    """The requests of an engine, those that run, and the device's blocks."""

    @property
    def sequences(self) -> Mapping[str, Reported]: ...

    @property
    def running(self) -> Mapping[str, Reported]: ...

    @property
    def pool(self) -> ReportedPool: ...

    def blocks(self) -> dict[str, int]:
        """The device blocks of each request that has some."""


class Reporter:
    """Reports events at once, and the progress of all requests every `every_steps` steps and after
    each plan. A report contains each request once."""

    def __init__(self, every_steps: int):
        self._every_steps = every_steps
        self._seq = 0
        self._steps = 0
        self.applied_plan_seq = 0
        self._finished: deque[Completion] = deque(maxlen=FINISHED_MAX)
        self._evicted: dict[str, Reported] = {}
        self._included: dict[str, Reported] = {}
        self._blocks: dict[str, int] = {}  # of each request with blocks, as last reported
        self._timings: deque[StepTiming] = deque(maxlen=TIMINGS_MAX)
        self._swaps: deque[SwapTiming] = deque(maxlen=TIMINGS_MAX)
        self._new_swaps: deque[SwapTiming] = deque(maxlen=NEW_SWAPS_MAX)
        self._everything = False
        self.tokens_per_step = 1.0  # of a decoding request, as last measured

    def begin(self, held: Container[str], blocks: dict[str, int]) -> None:
        """Begins reports to a new scheduler, which has received the held requests and their block
        counts. The next report has the progress of all, and unreported ends except those of earlier
        placements of held requests. Plans and reports are numbered from 1 again."""
        self._seq = self.applied_plan_seq = 0
        unsent = [ended for ended in self._finished if ended.request_id not in held]
        self._finished = deque(unsent, FINISHED_MAX)
        self._blocks = blocks
        self._everything = True

    def record_step(self, timings: Iterable[StepTiming]) -> tuple[SwapTiming, ...]:
        """Counts a step, and records the timings that became known with it. Returns the copies
        completed since the previous step."""
        self._steps += 1
        self._timings.extend(timings)
        swaps = tuple(self._new_swaps)
        self._new_swaps.clear()
        return swaps

    def record_steps(self, steps: int) -> None:
        """Counts further steps with unknown times."""
        self._steps += steps

    @property
    def steps_until_report(self) -> int:
        """Steps until the next report if nothing else happens; 0 if one is due."""
        if self._everything or self._finished or self._evicted or self._included:
            return 0
        return self._every_steps - self._steps

    def record_swaps(self, timings: Collection[SwapTiming]) -> None:
        """Records completed copies."""
        self._swaps.extend(timings)
        self._new_swaps.extend(timings)

    def record_plan(self, plan_seq: int) -> None:
        self.applied_plan_seq = plan_seq
        self._everything = True

    def record_completion(self, request_id: str, output_tokens: int, reason: FinishReason) -> None:
        self.forget(request_id)
        self._finished.append(Completion(request_id, output_tokens, reason))

    def restore(
        self, unsent: Collection[Report], waiting: Callable[[str], Reported | None]
    ) -> None:
        """Reports again what reports that were not sent say of ends and evictions. `waiting`
        returns a request of this id that does not run."""
        ended = [completion for report in unsent for completion in report.finished]
        self._finished = deque((*ended, *self._finished), FINISHED_MAX)
        for left in (progress for report in unsent for progress in report.evicted):
            if request := waiting(left.request_id):
                self.record_eviction(request)

    def record_eviction(self, sequence: Reported) -> None:
        self._included.pop(sequence.request_id, None)
        self._evicted[sequence.request_id] = sequence

    def include(self, sequence: Reported) -> None:
        """Includes a request's progress in the next report, because its slice ended or it was
        paused."""
        self._included[sequence.request_id] = sequence

    def forget(self, request_id: str) -> None:
        """Reports nothing more about a request that is gone."""
        self._included.pop(request_id, None)
        self._evicted.pop(request_id, None)

    def next_report(self, kv: ReportedMemory) -> Report | None:
        """The next report; None if there is nothing to report. O(requests with blocks)."""
        everything = self._everything or self._steps >= self._every_steps
        if not (everything or self._finished or self._evicted or self._included):
            return None
        self._seq += 1
        sequences, pool, blocks = kv.sequences, kv.pool, kv.blocks()
        about = dict(kv.running) if everything else {}
        about |= self._included
        about |= {r: sequences[r] for r in self._changed(blocks, about) if r in sequences}
        for request_id in self._evicted:
            about.pop(request_id, None)
        added, gone = pool.cached.pop_changes()
        report = Report(
            seq=self._seq,
            applied_plan_seq=self.applied_plan_seq,
            progress=_progress(about.values(), blocks),
            finished=tuple(self._finished),
            evicted=_progress(self._evicted.values(), blocks),
            timings=tuple(self._timings),
            swaps=tuple(self._swaps),
            free_blocks=pool.free_blocks,
            shared_blocks=pool.shared_blocks,
            prefixes_added=added,
            prefixes_gone=gone,
            tokens_per_step=self.tokens_per_step,
        )
        self._blocks = blocks
        self._clear(everything)
        return report

    def _changed(self, blocks: Mapping[str, int], about: Mapping[str, Reported]) -> list[str]:
        """Requests besides `about` with another block count than in the last report."""
        reported, changed = self._blocks, []
        if blocks.keys() - about.keys():
            changed = [r for r, n in blocks.items() if r not in about and reported.get(r) != n]
        if gone := reported.keys() - blocks.keys():
            changed += [r for r in reported if r in gone and r not in about]
        return changed

    def _clear(self, everything: bool) -> None:
        self._finished.clear()
        self._evicted.clear()
        self._included.clear()
        self._timings.clear()
        self._swaps.clear()
        if everything:
            self._everything = False
            self._steps = 0


def _progress(
    sequences: Iterable[Reported], blocks: Mapping[str, int]
) -> tuple[RequestProgress, ...]:
    return tuple([s.progress(blocks.get(s.request_id, 0)) for s in sequences])
