"""AdapterStore: the adapters of an engine. They change between two steps, on all ranks alike."""

from collections.abc import Callable, Mapping
from functools import partial

from services.worker.engine.ranks import Ranks
from services.worker.model.adapters.files import Adapter
from services.worker.model.adapters.pool import AdapterPool
from services.worker.requests.state import WorkerState
from services.worker.requests.types.prompt import Prompt


class AdapterStore:
    """Loads and unloads adapters, and copies them to the slots that requests need. Only `held` and
    `read` may be used by other threads than the engine's."""

    def __init__(self, pool: AdapterPool, state: WorkerState, ranks: Ranks):
        self.pool = pool
        self._state, self._ranks = state, ranks

    @property
    def held(self) -> Mapping[str, str]:
        """The folder of each adapter that new requests may use, by name."""
        return self.pool.held

    def read(self, name: str, path: str) -> Callable[[], None]:
        """Reads an adapter's files. Returns what stores them for new requests. Both raise
        ValueError with a sentence if the adapter cannot be held."""
        return partial(self._store, self.pool.read(name, path))

    def _store(self, adapter: Adapter) -> None:
        self._free()
        self.pool.load(adapter)
        self._ranks.send_adapter_load(adapter.name, adapter.path)

    def unload(self, name: str) -> None:
        """Refuses new requests with an adapter. Those that it has here keep it."""
        self.pool.retire(name)
        self._free()

    def _free(self) -> None:
        """Frees unloaded adapters without requests, and the cached KV, of which theirs is a part:
        another adapter may get the name."""
        state = self._state
        waiting = (prompt for prompt, _ in state.pending.prompts.values())
        here = (sequence.prompt for sequence in state.sequences.values())
        freed = self.pool.free_unused({prompt.adapter for prompt in (*here, *waiting)})
        for name in freed:
            state.steps.adapter_slots.forget(name)
            self._ranks.send_adapter_unload(name)
        if freed:
            state.pool.unpublish_all()

    def refusal(self, prompt: Prompt) -> str:
        """Why a prompt's adapter cannot be used; empty if it can."""
        if prompt.adapter and prompt.adapter not in self.held:
            return f"the adapter {prompt.adapter!r} is not loaded"
        return ""

    @property
    def counts(self) -> Mapping[str, int]:
        """Adapters by state."""
        slots = self._state.steps.adapter_slots
        return {"held": len(self.held), "placed": slots.used, "waiting": slots.waiting}

    @property
    def bytes_by_memory(self) -> Mapping[str, int]:
        """On all ranks, of the adapters in host memory and of all slots on the device."""
        size = self._ranks.size
        return {"host": self.pool.host_bytes * size, "device": self.pool.device_bytes * size}

    def place(self) -> None:
        """Copies adapters to the slots that the next step needs them in."""
        for name, slot in self._state.steps.adapter_slots.pop_placements():
            self._ranks.send_adapter_placement(name, slot)
            self.pool.place(name, slot)
