"""A small engine with the behaviour of vLLM's that VllmState relies on: requests wait until they
are admitted; a step gives each running request a token, and preempts the last one if blocks run
out; a preempted request has no KV and waits for a new admission. Its tokens are numbers in order.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from foretoken.vllm.worker.hosted_request import Generated
from foretoken.vllm.worker.state import VllmState
from services.core import FinishReason
from services.costs import StepTiming
from services.worker.requests.types.batch import StepResult
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt

BLOCK_TOKENS = 4


@dataclass
class ScriptedRequest:
    prompt: Prompt
    output_tokens: int
    num_computed_tokens: int = 0


class ScriptedVllm:
    """Also the pool of its blocks."""

    cached_blocks = 0

    def __init__(self, blocks: int):
        self.blocks = blocks
        self.requests: dict[str, ScriptedRequest] = {}
        self.running: list[str] = []
        self.state = VllmState(Limits(blocks, BLOCK_TOKENS, report_every_steps=4), self)

    # PlannedEngine

    @property
    def pool(self) -> "ScriptedVllm":
        return self

    def start(self, name: str, prompt: Prompt) -> ScriptedRequest:
        assert name not in self.requests
        self.requests[name] = request = ScriptedRequest(prompt, prompt.delivered_tokens)
        return request

    def admit(self, name: str) -> None:
        assert name in self.requests and name not in self.running
        self.running.append(name)

    def pause(self, names: Collection[str]) -> None:
        assert set(names) <= set(self.running)
        for name in names:
            self._preempt(name)

    def abort(self, names: Collection[str]) -> None:
        for name in list(names):
            if self.requests.pop(name, None) and name in self.running:
                self.running.remove(name)

    def set_victims(self, names: Sequence[str]) -> None:
        order = {name: at for at, name in enumerate(names)}
        self.running.sort(key=lambda name: -order.get(name, len(order)))

    # VllmPool

    @property
    def free_blocks(self) -> int:
        return self.blocks - sum(map(self._blocks_of, self.requests))

    @property
    def blank_blocks(self) -> int:
        return self.free_blocks

    @property
    def shared_blocks(self) -> int:
        return 0

    @property
    def usage(self) -> float:
        return 1 - self.free_blocks / self.blocks

    @property
    def cached(self) -> "ScriptedVllm":
        return self

    def pop_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // BLOCK_TOKENS)

    def unpublish_all(self) -> None:
        """Shares nothing."""

    # Steps

    def step(self) -> StepResult:
        """One token for each running request that has room."""
        preempted, generated = [], []
        for name in list(self.running):
            if name not in self.running:
                continue
            request = self.requests[name]
            request.num_computed_tokens = request.prompt.prompt_tokens + request.output_tokens
            while self.free_blocks < 0 and name in self.running:
                preempted.append(self.running[-1])
                self._preempt(self.running[-1])
            if name in self.running:
                generated.append(self._token(name))
        self.state.evict(preempted)
        return self.state.commit(generated, [StepTiming(0, len(generated), 0, 0.01)])

    def _token(self, name: str) -> Generated:
        request = self.requests[name]
        token = request.output_tokens
        request.output_tokens += 1
        ends = request.output_tokens == request.prompt.max_tokens
        if ends:
            self.abort([name])
        return Generated(name, [token], FinishReason.LENGTH if ends else None)

    def _preempt(self, name: str) -> None:
        self.running.remove(name)
        self.requests[name].num_computed_tokens = 0

    def _blocks_of(self, name: str) -> int:
        return self.blocks_for(self.requests[name].num_computed_tokens)
