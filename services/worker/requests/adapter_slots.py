"""AdapterSlots: which LoRA adapters are in the device's slots. Pure, without I/O.

A request with an adapter is computed while its adapter is in a slot. An adapter gets a free slot,
else the slot that was unused for longest, else it waits, and its requests keep their KV. While
adapters wait, one in use keeps its slot for `turn_steps` steps; then it waits behind them. The
adapter at place n of those that wait therefore gets a slot within ⌈n / slots⌉ turns.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.worker.requests.types.sequence import Sequence


@dataclass(slots=True)
class _Tenure:
    """An adapter's time in a slot: the steps in which it came and was last used."""

    slot: int
    came: int
    used: int


class AdapterSlots:
    """The adapters in `count` slots, by name."""

    def __init__(self, count: int, turn_steps: int):
        self.count = count
        self._turn_steps = turn_steps
        self._free = list(reversed(range(count)))
        self._tenures: dict[str, _Tenure] = {}
        self._waiting: dict[str, None] = {}  # a set in order of arrival
        self._placements: list[tuple[str, int]] = []
        self._step = 0

    @property
    def used(self) -> int:
        """Slots with an adapter."""
        return len(self._tenures)

    @property
    def waiting(self) -> int:
        """Adapters that wait for a slot."""
        return len(self._waiting)

    def begin_step(self) -> bool:
        """Counts a step. Returns whether an adapter has to leave its slot for one that waits, which
        changes the rows of the step. O(slots) while adapters wait, else O(1)."""
        self._step += 1
        return bool(self._waiting) and any(map(self._is_over, self._tenures))

    def narrow(self, sequences: list[Sequence]) -> list[Sequence]:
        """The sequences without an adapter and those with one in a slot, which they are told.
        Adapters that these sequences need get slots first, if they can. O(sequences + slots)."""
        if not self.count:
            return sequences
        needed = {s.prompt.adapter: None for s in sequences}  # a set in order of admission
        needed.pop("", None)
        if not needed and not self._waiting:
            return sequences
        self._place(needed)
        runnable = []
        for sequence in sequences:
            if name := sequence.prompt.adapter:
                tenure = self._tenures.get(name)
                if tenure is None:
                    continue
                sequence.adapter_slot = tenure.slot
            runnable.append(sequence)
        return runnable

    def pop_placements(self) -> list[tuple[str, int]]:
        """The adapters to copy to slots before the next step, in order."""
        placements, self._placements = self._placements, []
        return placements

    def forget(self, name: str) -> None:
        """Frees the slot of an adapter that is not held any more."""
        if tenure := self._tenures.pop(name, None):
            self._free.append(tenure.slot)

    def _place(self, needed: Collection[str]) -> None:
        for name in needed:
            if tenure := self._tenures.get(name):
                tenure.used = self._step
        self._waiting = {
            name: None
            for name in (*self._waiting, *needed)
            if name in needed and name not in self._tenures
        }
        for name in list(self._waiting):
            slot = self._take_slot(needed)
            if slot is None:
                return
            del self._waiting[name]
            self._tenures[name] = _Tenure(slot, self._step, self._step)
            self._placements.append((name, slot))

    def _take_slot(self, needed: Collection[str]) -> int | None:
        if self._free:
            return self._free.pop()
        tenures = self._tenures
        unused = [name for name in tenures if name not in needed]
        if unused:
            leaves = min(unused, key=lambda name: tenures[name].used)
        elif over := list(filter(self._is_over, tenures)):
            leaves = min(over, key=lambda name: tenures[name].came)
            self._waiting[leaves] = None
        else:
            return None
        return tenures.pop(leaves).slot

    def _is_over(self, name: str) -> bool:
        return self._step - self._tenures[name].came >= self._turn_steps

    def check_integrity(self) -> None:
        """Every slot is free or has one adapter; none of those waits. Raises AssertionError."""
        slots = [*self._free, *(tenure.slot for tenure in self._tenures.values())]
        assert sorted(slots) == list(range(self.count)), "a slot is lost or has two adapters"
        assert not self._waiting.keys() & self._tenures.keys(), "an adapter in a slot waits"
