"""Places requests and follows them: the pool, forecasts, bounds and metrics of all streams."""

from collections.abc import Callable
from itertools import count

from services.core import Outcome
from services.picker.config import PickerConfig
from services.picker.core.answers import Answer, AnswerFollower, follower
from services.picker.core.picking import Cause, Refusal
from services.picker.core.pool import Arrival, Placement, Pool
from services.picker.core.questions import Question, Terms
from services.picker.links.forecasts import Forecasts
from services.picker.metrics import COMPLETE, PickerMetrics
from services.runtime.prefix import owned_salt, prompt_hashes


class Tracker:
    """What the streams share."""

    def __init__(
        self,
        config: PickerConfig,
        pool: Pool,
        forecasts: Forecasts,
        metrics: PickerMetrics,
        clock: Callable[[], float],
        priority: Callable[[str], int],
    ):
        """`priority`: of an objective's name."""
        self._priority = priority
        self._config, self._pool, self._forecasts = config, pool, forecasts
        self._metrics, self._clock = metrics, clock
        self._reading_bytes = 0  # of bodies that are being read
        self._numbers = count(1)

    # Bodies

    def reserve(self, size: int, more: int) -> Refusal | None:
        """Reserves `more` bytes for a body that has `size`."""
        if size + more > self._config.max_body_bytes:
            most = self._config.max_body_bytes
            return Refusal(
                Cause.TOO_LARGE, f"the body has over {most} bytes (picker.max_body_bytes)"
            )
        if self._reading_bytes + more > self._config.max_reading_bytes:
            return Refusal(Cause.FULL, "too many bodies are being read; retry later", 1.0)
        self._reading_bytes += more
        return None

    def release(self, size: int) -> None:
        self._reading_bytes -= size

    def follow(self, content_type: str) -> AnswerFollower:
        return follower(content_type, self._config.max_answer_bytes)

    # Requests

    async def place(
        self, question: Question, terms: Terms, subset: frozenset[str] | None
    ) -> Placement | Refusal:
        """Forecasts and places a request, and counts it as in flight until `end`."""
        began_s, number, config = self._clock(), next(self._numbers), self._config
        max_tokens, size = self._max_tokens(question), len(question.prefix)
        tokens = question.prompt_tokens or round(size / self._pool.bytes_per_token)
        owner = terms.api_key if config.prefixes_by_key else ""
        salt = f"{question.model}\0{owned_salt(owner, question.salt)}"
        arrival = Arrival(
            number,
            await self._forecasts.forecast(number, question, tokens, max_tokens),
            max_tokens,
            prompt_bytes=size,
            prompt_tokens=question.prompt_tokens,
            choices=question.choices,
            streams=question.streams,
            ttft_s=terms.ttft_s,
            tpot_s=terms.tpot_s,
            priority=self._priority(terms.objective),
            hashes=prompt_hashes(
                question.prefix, config.prefix_blocks, config.prefix_block_bytes, salt
            ),
            subset=subset,
        )
        placed = self._pool.place(arrival, self._clock())
        if isinstance(placed, Placement):
            self._metrics.record(placed)
        else:
            self._forecasts.drop(number)
        self._metrics.pick.observe(self._clock() - began_s)
        return placed

    def record_refusal(self, refusal: Refusal) -> None:
        self._metrics.refused.labels(refusal.cause.value).inc()

    def on_served_by(self, placement: Placement, address: str) -> None:
        """The proxy states which endpoint has taken a request; empty: it does not."""
        self._pool.on_served_by(placement.number, address, self._clock())

    def on_failed(self, address: str, why: str) -> None:
        self._pool.on_failure(address, why, self._clock())

    def on_tokens(self, placement: Placement, tokens: int, waited_s: float | None) -> None:
        """`waited_s`: to the first token, if this is the first."""
        self._pool.on_tokens(placement.number, tokens, self._clock())
        if waited_s is not None:
            self._metrics.ttft.observe(waited_s)

    def end(
        self, placement: Placement, question: Question, answer: Answer, result: str, took_s: float
    ) -> None:
        """A request has ended; the length of a complete answer is learned."""
        tokens = answer.tokens if result == COMPLETE else 0
        counted = answer.prompt_tokens if question.whole_text else 0
        self._pool.end(placement.number, tokens, counted, self._clock())
        self._metrics.ended.labels(result).inc()
        self._metrics.tokens.inc(answer.tokens)
        if tokens and answer.reason is not None and question.choices == 1:
            outcome = Outcome(
                self._forecasts.name(placement.number),
                question.model,
                "",
                answer.prompt_tokens,
                tokens,
                self._max_tokens(question),
                answer.reason,
                took_s,
                preemptions=0,
            )
            self._forecasts.learn(outcome)
        else:
            self._forecasts.drop(placement.number)

    def _max_tokens(self, question: Question) -> int:
        return question.max_tokens or self._config.max_output_tokens
