"""The bare engine: no services, no sockets, the loop alone."""

import time
from collections.abc import Sequence

from services.core import Grant, Plan
from services.worker.config import DtypeName, EngineConfig
from services.worker.engine.step import Engine
from services.worker.requests.types.prompt import Prompt, SamplingParams

Prompts = Sequence[Sequence[int]]


class BareEngine:
    """One engine for many calls; every call leaves it empty."""

    def __init__(self, folder: str, kv_tokens: int, dtype: DtypeName = "auto"):
        self.engine = Engine.load(EngineConfig(model=folder, kv_tokens=kv_tokens, dtype=dtype))
        self._plans = 0
        self._names = 0

    def start(self, prompts: Prompts, output_tokens: int) -> None:
        """All further steps of the engine are theirs, until each has this many tokens."""
        names = [f"r{self._names + i}" for i in range(len(prompts))]
        self._names += len(names)
        self._plans += 1
        admit = tuple(Grant(name, output_tokens) for name in names)
        self.engine.state.apply_plan(Plan(self._plans, admit=admit), 0.0)
        for name, prompt in zip(names, prompts, strict=True):
            sampling = SamplingParams(temperature=0.0, ignore_eos=True)
            self.engine.add(Prompt(name, tuple(prompt), len(prompt), output_tokens, sampling), 0.0)

    def tokens_per_s(self, prompts: Prompts, output_tokens: int) -> float:
        """All prompts at once, each answered greedily with this many tokens."""
        began = time.perf_counter()
        self.start(prompts, output_tokens)
        made = 0
        while (result := self.engine.step()) is not None:
            made += len(result.tokens)
        elapsed = time.perf_counter() - began
        self.engine.state.report()
        if made != output_tokens * len(prompts):
            raise RuntimeError(f"the engine made {made} tokens, not all that were asked for")
        return made / elapsed

    def ttft_s(self, prompt: Sequence[int]) -> float:
        """From a single prompt to its first token."""
        began = time.perf_counter()
        self.start([prompt], 1)
        while self.engine.step() is not None:
            pass
        return time.perf_counter() - began
