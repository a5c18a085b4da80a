"""The bare engine: its loop alone, without services and sockets."""

import time
from collections.abc import Sequence

from benchmarks.harness.throughput import Prompts, tokens_per_s
from services.core import Grant, Plan
from services.worker.config import DtypeName, EngineConfig
from services.worker.engine.step import Engine
from services.worker.requests.types.prompt import Prompt, SamplingParams


class BareEngine:
    """One engine for many calls. Each call leaves it empty."""

    def __init__(self, folder: str, kv_tokens: int, dtype: DtypeName = "auto"):
        self.engine = Engine.load(EngineConfig(model=folder, kv_tokens=kv_tokens, dtype=dtype))
        self._plans = 0
        self._requests = 0

    def submit(self, prompts: Prompts, output_tokens: int) -> None:
        """Submits requests that the engine's next steps answer with `output_tokens` each."""
        names = [f"r{self._requests + i}" for i in range(len(prompts))]
        self._requests += len(names)
        self._plans += 1
        admit = tuple(Grant(name, output_tokens) for name in names)
        self.engine.state.apply_plan(Plan(self._plans, admit=admit), 0.0)
        for name, prompt in zip(names, prompts, strict=True):
            sampling = SamplingParams(temperature=0.0, ignore_eos=True)
            self.engine.add(Prompt(name, tuple(prompt), len(prompt), output_tokens, sampling), 0.0)

    def tokens_per_s(self, prompts: Prompts, output_tokens: int) -> float:
        """Answers all prompts at once, greedily."""
        began_s = time.perf_counter()
        self.submit(prompts, output_tokens)
        tokens = 0
        while (result := self.engine.step()) is not None:
            tokens += len(result.tokens)
        elapsed_s = time.perf_counter() - began_s
        self.engine.state.report()
        return tokens_per_s("the engine", tokens, prompts, output_tokens, elapsed_s)

    def ttft_s(self, prompt: Sequence[int]) -> float:
        """Returns the time from a single prompt to its first token."""
        return 1 / self.tokens_per_s([prompt], 1)
