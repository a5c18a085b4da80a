"""TapeRecorder: a Recorder for a CPU that freezes what a CUDA graph freezes.

It records PyTorch operations with their tensors and numbers, and launches of Triton's interpreter.
A replay runs no Python code of the engine: decisions of the host, and values read from its arrays,
are those of the recording. Results of an operation are undefined between two replays: they are
overwritten before and after.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero")


@dataclass
class Tape:
    """Calls in order, and the tensors that they create."""

    calls: list[Callable[[], None]] = field(default_factory=list)
    made: list[Tensor] = field(default_factory=list)

    def play(self) -> None:
        with torch.inference_mode():
            self.poison()
            for call in self.calls:
                call()
            self.poison()

    def poison(self) -> None:
        for tensor in self.made:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # no types
    def __init__(self, tape: Tape):
        super().__init__()  # type: ignore[no-untyped-call]  # no types
        self._tape = tape
        self._known: set[int] = set()  # storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in READS, f"{name}: the host waits for the device"
        given = kwargs or {}
        self.seen((args, given))
        out = func(*args, **given)
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        for result in results:
            if _storage(result) not in self._known:
                self._known.add(_storage(result))
                self._tape.made.append(result)

        def again() -> None:
            anew = [x for x in tree_leaves(func(*args, **given)) if isinstance(x, Tensor)]
            for result, new in zip(results, anew, strict=True):
                if new.data_ptr() != result.data_ptr():
                    result.copy_(new)

        self._tape.calls.append(again)
        return out

    def seen(self, tree: object) -> None:
        """Registers tensors that existed before the recording."""
        self._known |= {_storage(x) for x in tree_leaves(tree) if isinstance(x, Tensor)}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _launches_noted(tape: Tape, noting: _Noting) -> Iterator[None]:
    launch = GridExecutor.__call__

    def note(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        noting.seen((args, kwargs))
        tape.calls.append(lambda: launch(self, *args, **kwargs))
        with _disable_current_modes():
            launch(self, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", note):
        yield


class TapeRecorder:
    """`recorded` counts tapes, `played` counts replays."""

    def __init__(self) -> None:
        self.recorded = 0
        self.played = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()  # as CudaRecorder does, so that lazy initialisation is not recorded
        self.recorded += 1
        tape = Tape()
        noting = _Noting(tape)
        with noting, _launches_noted(tape, noting):
            work()

        def replay() -> None:
            self.played += 1
            tape.play()

        return replay

    def used_bytes(self) -> int:
        return 0
