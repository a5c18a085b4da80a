"""Forecasts known answer lengths, and max_tokens for every other request."""

from collections.abc import Sequence
from types import MappingProxyType

from services.core import LiveAnswers
from services.forecast import Forecast, certain
from services.predictor.interface import Example, KnownLengths, Prompt, Query

SOURCE = "oracle"
NO_LENGTH = "max"  # source of a forecast of max_tokens


class OraclePredictor:
    """Forecasts the known length, capped at `max_tokens`, and `max_tokens` for unknown prompts.

    A length for the exact instruction takes precedence over one for any instruction. Without known
    lengths this is the assumption of TGI and FastGen (Past-Future Scheduler, Gong et al., ASPLOS
    2025, §2).
    """

    version = 0

    def __init__(self, lengths: KnownLengths = MappingProxyType({})):
        self._lengths = lengths

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [self._forecast(query) for query in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        """Learns nothing."""
        return 0

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Does nothing."""

    def _forecast(self, query: Query) -> Forecast:
        tokens = self._known(query.prompt) if query.prompt else None
        if tokens is None:
            return certain(query.max_tokens, NO_LENGTH)
        return certain(min(tokens, query.max_tokens), SOURCE)

    def _known(self, prompt: Prompt) -> int | None:
        exact = self._lengths.get((prompt.instruction, prompt.user_input))
        return self._lengths.get((None, prompt.user_input)) if exact is None else exact
