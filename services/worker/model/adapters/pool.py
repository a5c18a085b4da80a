"""AdapterPool: the adapters that a worker holds, each in a slot of every linear map."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from services.worker.kernels.low_rank import NO_SLOT, LowRankMap
from services.worker.model.adapters.files import Adapter, read_adapter

Sizes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MapPart:
    """A linear map of the module, as a part of the map that computes it."""

    change: LowRankMap
    part: int

    @property
    def size(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.change.inputs, self.change.widths[self.part]


class AdapterPool:
    """Adapters by name, in `slots` slots, of ranks up to `rank`. All memory is allocated at the
    start. An unloaded adapter keeps its slot while requests use it."""

    def __init__(self, parts: Mapping[str, MapPart], slots: int, rank: int):
        self.slots, self.rank = slots, rank
        self._parts = parts
        self._maps = list({id(part.change): part.change for part in parts.values()}.values())
        # The folder of each adapter that new requests may use, by name. Replaced, never changed, so
        # that other threads may read it.
        self.held: Mapping[str, str] = {}
        self._slots: dict[str, int] = {}
        self._retired: set[str] = set()

    @property
    def sizes(self) -> Sizes:
        """(inputs, outputs) of the linear maps that adapters may change, by path."""
        return {path: part.size for path, part in self._parts.items()}

    @property
    def bytes(self) -> int:
        """Device memory of all slots."""
        return sum(change.bytes for change in self._maps)

    @property
    def empty(self) -> bool:
        """Whether no request can use an adapter."""
        return not self._slots

    def slot(self, name: str) -> int:
        """The slot of a name; NO_SLOT for the base model."""
        return self._slots[name] if name else NO_SLOT

    def read(self, name: str, path: str) -> Adapter:
        """Reads an adapter's folder. Raises ValueError with a sentence."""
        if not self.slots:
            raise ValueError(
                "this worker holds no adapters: set worker.max_adapters to the number that it may "
                "hold"
            )
        return read_adapter(name, path, self.sizes, self.rank)

    def load(self, adapter: Adapter) -> None:
        """Stores an adapter. Raises ValueError with a sentence if its name is in use or no slot is
        free."""
        name = adapter.name
        if name in self._retired:
            raise ValueError(
                f"the adapter {name} was unloaded, and requests still use it: load it again when "
                "they have ended"
            )
        if name in self._slots:
            raise ValueError(f"an adapter {name} is loaded: unload it before")
        taken = set(self._slots.values())
        slot = next((each for each in range(self.slots) if each not in taken), None)
        if slot is None:
            raise ValueError(
                f"{self.slots} adapters are loaded, as many as worker.max_adapters allows: unload "
                "one, or set it higher"
            )
        by_map: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        for path, pair in adapter.weights.items():
            part = self._parts[path]
            by_map.setdefault(id(part.change), {})[part.part] = pair
        for change in self._maps:
            change.set(slot, by_map.get(id(change), {}))
        self._slots[name] = slot
        self.held = {**self.held, name: adapter.path}

    def retire(self, name: str) -> None:
        """New requests cannot use an adapter any more."""
        if name in self.held:
            self._retired.add(name)
            self.held = {each: path for each, path in self.held.items() if each != name}

    def free_unused(self, used: Collection[str]) -> bool:
        """Frees the slots of retired adapters that no request uses. Returns whether any was."""
        unused = [name for name in self._retired if name not in used]
        for name in unused:
            slot = self._slots.pop(name)
            self._retired.discard(name)
            for change in self._maps:
                change.clear(slot)
        return bool(unused)
