"""What a round says: who runs next, where, for how many tokens, and why the others wait."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from services.forecast import Floats, Ints
from services.policies.memory import Memory


class Reason(IntEnum):
    """Why a waiting job does or does not run next; `Why.a` and `Why.b` are the numbers it
    is about."""

    ADMITTED = 0  # a: KV tokens foreseen with it, b: how many may be planned
    MEMORY = 1  # a: KV tokens needed with it, b: how many may be planned
    PLACES = 2  # a: how many would run, b: how many may
    BEHIND = 3  # stands behind one that does not fit; a: its place in the line
    NO_WORKER = 4  # no worker with its model, its KV or its length has a place for it
    IN_BATCH = 5  # any worker takes its batch; a: batches before it, b: how many are in it
    BUDGET = 6  # a: tokens to compute next with it, b: how many a step has
    BOUND = 7  # its batch waits for one worker; a: batches before it there, b: the worker's number
    POOLED = 8  # the pool is cut into batches at its time; a: seconds until then
    UNCUT = 9  # the pool is cut when a worker has nothing to do; a: its place in the pool


SENTENCES = {
    Reason.ADMITTED: "admitted: {a:.0f} tokens of KV foreseen with it, {b:.0f} may be planned",
    Reason.MEMORY: "needs {a:.0f} tokens of KV in all, {b:.0f} may be planned",
    Reason.PLACES: "{a:.0f} requests run, {b:.0f} is the most this worker takes",
    Reason.BEHIND: "stands at place {a:.0f}, behind one that does not fit",
    Reason.NO_WORKER: "no worker that could run it has a place",
    Reason.IN_BATCH: "in a batch of {b:.0f}, {a:.0f} batches come before it",
    Reason.BUDGET: "with it {a:.0f} tokens are to be computed next, a step has {b:.0f}",
    Reason.BOUND: "in a batch for worker {b:.0f}, {a:.0f} batches come before it there",
    Reason.POOLED: "waits for the pool to be cut into batches, in {a:.1f} s",
    Reason.UNCUT: "stands at place {a:.0f} of the pool, until a worker has ended its batch",
}


@dataclass(frozen=True, slots=True)
class Why:
    """What became of one waiting job that was looked at, and the numbers behind it."""

    reason: Reason
    a: float
    b: float

    def __str__(self) -> str:
        return SENTENCES[self.reason].format(a=self.a, b=self.b)


_NO_ROWS = np.zeros(0, np.int64)
_NO_NUMBERS = np.zeros(0)


@dataclass(frozen=True)
class Whys:
    """The same of all of them, in columns; `rows` are the board's."""

    rows: Ints = field(default_factory=_NO_ROWS.copy)
    reasons: Ints = field(default_factory=_NO_ROWS.copy)
    a: Floats = field(default_factory=_NO_NUMBERS.copy)
    b: Floats = field(default_factory=_NO_NUMBERS.copy)

    def at(self, which: NDArray[np.bool_]) -> "Whys":
        """Those for which it is true."""
        return Whys(*(getattr(self, name)[which] for name in _WHY_COLUMNS))

    def of(self, row: int) -> Why | None:
        """None for one that was not looked at."""
        at = np.flatnonzero(self.rows == row)
        if not len(at):
            return None
        i = at[-1]
        return Why(Reason(int(self.reasons[i])), float(self.a[i]), float(self.b[i]))

    @staticmethod
    def joined(parts: Sequence["Whys"]) -> "Whys":
        if not parts:
            return Whys()
        return Whys(*(np.concatenate([getattr(p, name) for p in parts]) for name in _WHY_COLUMNS))


_WHY_COLUMNS = ("rows", "reasons", "a", "b")


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part of a decision; all but the peak are board rows.

    `run` are those who run next, the most urgent first, and `limits` the output each may have
    made before it stops by itself. `pause` run now and don't next; their KV stays where the
    preset's residency puts it. `victims` go first to last when memory runs out. Those who come in
    in `lockstep` are a static batch: they begin together, padded to the longest, and nobody leaves
    before all have ended or made what they may.
    """

    worker: int
    run: Ints
    limits: Ints
    pause: Ints
    victims: Ints
    peak_tokens: float = 0.0
    lockstep: bool = False


@dataclass(frozen=True)
class Decision:
    """Of one round. `rows` and their `serials` are those it is about: a row that has another
    serial by the time it is carried out is another job's, and is left alone. Time alone calls
    for the next round at `next_s`; events may do so from `not_before_s` on. `numbers` and `notes`
    (parallel to `rows`) are what the arrangement adds to the `memory`."""

    round: int
    shares: tuple[Share, ...] = ()
    why: Whys = field(default_factory=Whys)
    rows: Ints = field(default_factory=_NO_ROWS.copy)
    serials: Ints = field(default_factory=_NO_ROWS.copy)
    next_s: float = np.inf
    not_before_s: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, Floats] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
