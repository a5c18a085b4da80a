"""PhaseClock: the time of the engine's thread by phase.

It reads the clock at the beginning of each phase: 2 µs per step and 0.5 µs per layer on a CPU,
without waiting for the device. On a CPU, attention is separate from the rest of the model. A GPU's
work is only launched in these phases, and its time passes while the thread waits for the drawn
tokens: all of it counts as `model`, and `sampling` is the time to launch the sampling.
"""

from enum import IntEnum
from time import perf_counter


class EnginePhase(IntEnum):
    COMPOSE = 0
    SWAP = 1  # nothing can run before KV is back from host memory
    MODEL = 2
    ATTENTION = 3
    SAMPLING = 4
    COMMIT = 5


class PhaseClock:
    """Steps, each from `begin` to `end`; one without an end does not count. `seconds` are the
    totals by EnginePhase; any thread may read them."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(EnginePhase)
        self._step = [0.0] * len(EnginePhase)
        self._phase = EnginePhase.COMPOSE
        self._since_s = 0.0

    def begin(self) -> None:
        self._step = [0.0] * len(EnginePhase)
        self._phase = EnginePhase.COMPOSE
        self._since_s = perf_counter()

    def enter(self, phase: EnginePhase) -> None:
        """Ends the current phase and begins this one."""
        now = perf_counter()
        self._step[self._phase] += now - self._since_s
        self._phase, self._since_s = phase, now

    def end(self) -> None:
        self.enter(EnginePhase.COMPOSE)
        for at, seconds in enumerate(self._step):
            self.seconds[at] += seconds
