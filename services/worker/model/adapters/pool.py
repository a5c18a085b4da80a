"""AdapterPool: the adapters that a worker holds in host memory, and those in the device's slots."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor

from services.worker.kernels.low_rank import LowRankMap
from services.worker.model.adapters.files import Adapter, read_adapter
from services.worker.model.rank_group import RankGroup
from services.worker.model.tensor_sharding import TensorSharder

Sizes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MapPart:
    """A linear map of the module, as a part of the map that computes it. With several ranks it is a
    shard of the `whole` map of so many inputs and outputs."""

    change: LowRankMap
    part: int
    whole: tuple[int, int]
    ranks: RankGroup | None = None

    def shard(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's columns of A [rank, in] and rows of B [out, rank]."""
        inputs, outputs = self.change.inputs, self.change.widths[self.part]
        return self._shard(down, 1, inputs), self._shard(up, 0, outputs)

    def _shard(self, whole: Tensor, dim: int, size: int) -> Tensor:
        if self.ranks is None or whole.shape[dim] == size:
            return whole
        first, end = self.ranks.bounds(whole.shape[dim])
        return whole.narrow(dim, first, end - first)


def map_parts(
    found: Mapping[str, tuple[LowRankMap, int]], sharder: TensorSharder | None
) -> Mapping[str, MapPart]:
    """The linear maps by path, of maps that compute them and their parts there. `sharder` has kept
    this rank's part of the module."""
    ranks, wholes = (sharder.ranks, sharder.wholes) if sharder else (None, {})
    return {
        path: MapPart(change, part, wholes.get(path, (change.inputs, change.widths[part])), ranks)
        for path, (change, part) in found.items()
    }


class AdapterPool:
    """Up to `most` adapters by name, of ranks up to `rank`. `slots` of them are on the device at a
    time; their memory is allocated at the start. An unloaded adapter is kept while requests use it.

    All but `read` is called by the engine's thread, between two steps."""

    def __init__(self, parts: Mapping[str, MapPart], most: int, slots: int, rank: int):
        self.most, self.slots, self.rank = most, slots, rank
        self._parts = parts
        self._maps = list({id(part.change): part.change for part in parts.values()}.values())
        # The folder of each adapter that new requests may use, by name. Replaced, never changed, so
        # that other threads may read it.
        self.held: Mapping[str, str] = {}
        self._stored: dict[str, Adapter] = {}  # those of `held`, and unloaded ones in use
        self._placed: dict[int, str] = {}  # by slot
        self.host_bytes = 0  # of the adapters in host memory
        self.copies, self.copy_s = 0, 0.0  # to slots, and the seconds that they took

    @property
    def sizes(self) -> Sizes:
        """(inputs, outputs) of the linear maps that adapters may change, by path."""
        return {path: part.whole for path, part in self._parts.items()}

    @property
    def device_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(change.bytes for change in self._maps)

    @property
    def is_unplaced(self) -> bool:
        """Whether no adapter is in a slot."""
        return not self._placed

    def read(self, name: str, path: str) -> Adapter:
        """Reads an adapter's folder, in any thread. Returns this rank's part, as `place` copies it:
        in the device's dtype, and B transposed. Raises ValueError with a sentence."""
        if not self.most:
            raise ValueError(
                "this worker holds no adapters: set worker.max_adapters to the number that it may "
                "hold"
            )
        adapter = read_adapter(name, path, self.sizes, self.rank)
        weights = {each: self._prepare(each, *pair) for each, pair in adapter.weights.items()}
        return replace(adapter, weights=weights)

    def _prepare(self, path: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        part = self._parts[path]
        down, up = part.shard(down, up)
        room = part.change.down
        rows, columns = (
            torch.empty(shape, dtype=room.dtype, pin_memory=room.device.type == "cuda")
            for shape in (down.shape, up.t().shape)
        )
        return rows.copy_(down), columns.copy_(up.t())

    def load(self, adapter: Adapter) -> None:
        """Stores an adapter in host memory. Raises ValueError with a sentence if its name is in use
        or there is no room."""
        name = adapter.name
        if name in self.held:
            raise ValueError(f"an adapter {name} is loaded: unload it before")
        if name in self._stored:
            raise ValueError(
                f"the adapter {name} was unloaded, and requests still use it: load it again when "
                "they have ended"
            )
        if len(self._stored) >= self.most:
            raise ValueError(
                f"{self.most} adapters are loaded, as many as worker.max_adapters allows: unload "
                "one, or set it higher"
            )
        self._stored[name] = adapter
        self.held = {**self.held, name: adapter.path}
        self.host_bytes += adapter.bytes

    def place(self, name: str, slot: int) -> None:
        """Copies an adapter to a slot, in place of the one there. On a GPU, steps launched before
        compute with that one, and the copy is launched, not awaited."""
        began_s = perf_counter()
        by_map: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        for path, pair in self._stored[name].weights.items():
            part = self._parts[path]
            by_map.setdefault(id(part.change), {})[part.part] = pair
        for change in self._maps:
            change.set(slot, by_map.get(id(change), {}))
        self._placed[slot] = name
        self.copies += 1
        self.copy_s += perf_counter() - began_s

    def retire(self, name: str) -> None:
        """New requests cannot use an adapter any more."""
        self.held = {each: path for each, path in self.held.items() if each != name}

    def free_unused(self, used: Collection[str]) -> list[str]:
        """Frees retired adapters that no request uses, and returns their names."""
        unused = [name for name in self._stored if name not in self.held and name not in used]
        for name in unused:
            self.host_bytes -= self._stored.pop(name).bytes
        for slot in [slot for slot, name in self._placed.items() if name in unused]:
            del self._placed[slot]
            for change in self._maps:
                change.clear(slot)
        return unused
