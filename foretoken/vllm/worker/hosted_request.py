"""One request at a worker with vLLM's engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from services.core import FinishReason, HeldRequest, RequestProgress
from services.worker.requests.types.batch import NewToken, TokenLogprobs
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.scores import Opening


class EngineRequest(Protocol):
    """vLLM's request."""

    num_computed_tokens: int  # those of steps in flight, too


class Generated(NamedTuple):
    """What vLLM has generated for a request in a step. `name` is the request's in vLLM."""

    name: str
    token_ids: Sequence[int]
    finish: FinishReason | None = None
    # Of each token, with at least as many alternatives as asked for.
    logprobs: Sequence[TokenLogprobs] | None = None
    opening: Opening = Opening()  # of the first token since the request arrived


@dataclass(slots=True, eq=False)
class HostedRequest:
    """`name` is the request's in vLLM. It differs for each placement, because a request may return
    while a step computes its earlier placement. `engine_request` is None until it is admitted."""

    prompt: Prompt
    name: str
    limit_tokens: int  # the plan's budget
    output_tokens: int
    runs: bool = False
    opened: bool = False  # whether it has a token since it arrived
    engine_request: EngineRequest | None = None

    @classmethod
    def start(cls, prompt: Prompt, name: str, limit_tokens: int) -> "HostedRequest":
        return cls(prompt, name, limit_tokens, prompt.delivered_tokens)

    @property
    def request_id(self) -> str:
        return self.prompt.request_id

    @property
    def held_tokens(self) -> int:
        """Tokens with KV, without the newest one."""
        if self.engine_request is None or not self.runs:
            return 0
        known = self.prompt.prompt_tokens + self.output_tokens
        return min(self.engine_request.num_computed_tokens, known - 1)

    def extend(self, generated: Generated) -> list[NewToken]:
        """Adds generated tokens; returns them as they are sent."""
        prompt, last = self.prompt, len(generated.token_ids) - 1
        tokens = [
            NewToken(
                prompt.origin,
                prompt.request_id,
                self.output_tokens + at,
                token,
                generated.finish if at == last else None,
                self._asked(generated.logprobs[at]) if generated.logprobs else None,
                None if self.opened or at else generated.opening,
            )
            for at, token in enumerate(generated.token_ids)
        ]
        self.opened = self.opened or bool(tokens)
        self.output_tokens += len(tokens)
        return tokens

    def _asked(self, logprobs: TokenLogprobs) -> TokenLogprobs | None:
        """With as many alternatives as the request asks for; None if it asks for none."""
        most = self.prompt.sampling.logprobs
        if most is None:
            return None
        return TokenLogprobs(logprobs.chosen, logprobs.top_ids[:most], logprobs.top[:most])

    def progress(self, blocks: int) -> RequestProgress:
        return RequestProgress(self.request_id, self.output_tokens, self.held_tokens, blocks)

    def held(self, blocks: int) -> HeldRequest:
        """Everything that a scheduler needs to adopt the request."""
        return HeldRequest(
            self.request_id,
            self.prompt.prompt_tokens,
            self.prompt.max_tokens,
            self.output_tokens,
            self.held_tokens,
            self.limit_tokens,
            self.runs,
            blocks,
        )
