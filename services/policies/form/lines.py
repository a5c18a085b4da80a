"""Jobs of several queues in one array, and sums over each queue's part of it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import Bools, stable_order


@dataclass(frozen=True)
class Lines:
    """Jobs of several queues, by queue, in the order of each: `which` is the index of each one's
    queue, ascending, and `sizes` how many each queue has here. Sums are the differences of running
    sums over all lines. Whole numbers below 2^53 are exact; other sums differ from those of one
    line alone by rounding. Everything is O(jobs + queues)."""

    jobs: Ints
    which: Ints
    sizes: Ints

    @staticmethod
    def consecutive(sizes: Ints) -> "Lines":
        """All jobs of queues of these sizes."""
        which = np.arange(len(sizes)).repeat(sizes)
        return Lines(np.arange(len(which)), which, sizes)

    @cached_property
    def starts(self) -> Ints:
        """Where each line begins."""
        starts: Ints = self.sizes.cumsum() - self.sizes
        return starts

    @cached_property
    def nth(self) -> Ints:
        """The place of each job in its line, from 0 on."""
        nth: Ints = np.arange(len(self.which)) - self.starts[self.which]
        return nth

    def count(self, marked: Bools) -> Ints:
        """How many of each line are marked."""
        return np.bincount(self.which[marked], minlength=len(self.sizes))

    def first(self, marked: Bools, front: Ints | int = 0) -> Ints:
        """How many jobs each line has before its first marked one at or behind the place `front`;
        all of them without one."""
        at = np.concatenate([marked.nonzero()[0], [len(marked)]])
        places: Ints = at[at.searchsorted(self.starts + front)] - self.starts
        return np.minimum(places, self.sizes)

    def places(self, nth: Ints, lines: Bools) -> Ints:
        """The places here of the job that has so many before it, of each of these lines that has
        such a job."""
        at: Ints = (self.starts + nth)[lines & (nth < self.sizes)]
        return at

    def upto(self, count: Ints) -> "Lines":
        """So many of the first jobs of each line."""
        if (count >= self.sizes).all():
            return self
        kept = self.nth < count[self.which]
        return Lines(self.jobs[kept], self.which[kept], np.minimum(count, self.sizes))

    def select(self, marked: Bools) -> "Lines":
        """The marked jobs."""
        return Lines(self.jobs[marked], self.which[marked], self.count(marked))

    def followed_by(self, later: "Lines") -> "Lines":
        """Each line with that of `later` behind it."""
        which = np.concatenate([self.which, later.which])
        order = stable_order(which)
        jobs = np.concatenate([self.jobs, later.jobs])
        return Lines(jobs[order], which[order], self.sizes + later.sizes)

    def running_sums(self, values: Floats | Ints) -> Floats:
        """Sums over each line up to each job, of values (…, jobs)."""
        upto = _upto(values)
        if len(self.sizes) == 1:  # it starts at 0: nothing to subtract
            return upto[..., 1:]
        sums: Floats = upto[..., 1:] - upto.take(self.starts, axis=-1).take(self.which, axis=-1)
        return sums

    def sums(self, values: Floats | Ints) -> Floats:
        """Sums over each line, (…, queues), of values (…, jobs)."""
        upto = _upto(values)
        sums: Floats = upto.take(self.starts + self.sizes, axis=-1)
        sums -= upto.take(self.starts, axis=-1)
        return sums


def _upto(values: Floats | Ints) -> Floats:
    """Running sums over all lines, from 0 on."""
    upto = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=upto[..., 1:])
    return upto
