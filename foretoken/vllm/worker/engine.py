"""VllmEngine: vLLM behind the interface of the worker's engines.

    commands → VllmState → VllmCore → a step of vLLM → VllmState → tokens and reports

As a step of vLLM either succeeds or ends its engine, the worker ends with it, and is restarted.
"""

import logging
from collections.abc import Callable, Set

from foretoken.vllm.worker.core import VllmCore
from foretoken.vllm.worker.grammars import find_grammar_refusal
from foretoken.vllm.worker.state import VllmState
from services.runtime.errors import UnrecoverableError
from services.worker.engine.interface import StepFailed
from services.worker.engine.phase_clock import EnginePhase, PhaseClock
from services.worker.requests.types.batch import StepResult
from services.worker.requests.types.prompt import Prompt

log = logging.getLogger(__name__)

LOST = "a process of vLLM's replica has ended"
FAILED = "vLLM ended requests with an error"
STUCK = "the answer cannot follow its schema or grammar any further"


class VllmEngine:
    """One replica. Its KV is vLLM's, and has no bytes in host memory."""

    kv_bytes_per_token = 0  # unknown
    host_block_bytes = 0

    def __init__(self, core: VllmCore, report_every_steps: int, placement: str):
        self.state = VllmState(core.limits(report_every_steps), core)
        self.phases = PhaseClock()
        self.placement = placement
        self._core = core
        self._lost = False

    def on_lost(self) -> None:
        """A process of the replica has ended. Any thread."""
        self._lost = True

    def enter_thread(self) -> None:
        """Needs no preparation."""

    def prepare(self, prompt: Prompt, on_ready: Callable[[], None]) -> bool:
        """Begins to compile a grammar. Returns whether there is nothing to wait for; else another
        thread calls `on_ready` afterwards."""
        grammars = self._core.grammars
        return grammars.prepare(prompt.sampling.grammar, on_ready, self._used_grammars)

    def _used_grammars(self) -> Set[str]:
        """Grammars of the requests here, for which vLLM makes a matcher at their start and after
        each pause. O(requests)."""
        prompts = [prompt for prompt, _ in self.state.pending.prompts.values()]
        prompts += [request.prompt for request in self.state.sequences.values()]
        return {prompt.sampling.grammar for prompt in prompts}

    def add(self, prompt: Prompt, now: float) -> str | None:
        """Adds a prompt. Returns why it can never run here, else None."""
        if field := prompt.beyond(self._core.vocab_size):
            self.state.refuse(prompt.request_id)
            return f"{field} must lie in [0, {self._core.vocab_size})"
        if why := find_grammar_refusal(self._core.grammars, prompt):
            self.state.refuse(prompt.request_id)
            return why
        return self.state.receive(prompt, now)

    def step(self) -> StepResult | None:
        """Computes one step and returns its result; None if nothing can run. Raises StepFailed for
        requests that vLLM has ended with an error, and UnrecoverableError if its engine fails."""
        if failed := self.state.pop_failed():
            constrained = all(request.prompt.sampling.grammar for request in failed)
            raise StepFailed(STUCK if constrained else FAILED, failed)
        try:
            if not self._core.has_work:
                self._core.forget_ended()
                return None
            self.phases.begin()
            self.phases.enter(EnginePhase.MODEL)  # vLLM's scheduler and sampling count as the model
            generated = self._core.step()
        except Exception as error:
            log.exception("vLLM's engine failed")
            cause = LOST if self._lost else f"{type(error).__name__}: {error}"
            raise UnrecoverableError(
                f"vLLM's engine failed ({cause}); the worker ends, and its requests continue "
                "elsewhere"
            ) from error
        self.phases.end()
        self.state.evict(self._core.pop_preempted())
        if generated is None:
            return None
        return self.state.commit(generated, self._core.pop_timings())

    def reset(self) -> None:
        self.state.reset()

    def can_compute(self) -> bool:
        """A step that fails ends the engine."""
        return True

    def check(self) -> None:
        """Raises ValueError with a sentence if a process of the replica has ended."""
        if self._lost:
            raise ValueError(f"{LOST}; the worker ends, and its requests continue elsewhere")

    def close(self) -> None:
        self._core.shutdown()
