"""Ends reasoning that reaches its budget of tokens. Pure."""

from collections.abc import Sequence

from gateway.requests.incremental import AnswerDetokenizer
from gateway.types.generation import ReasoningLimit


class ReasoningBudget:
    """Watches the tokens of one answer until its reasoning has ended or is cut."""

    def __init__(self, limit: ReasoningLimit, detokenizer: AnswerDetokenizer):
        self._limit, self._detokenizer = limit, detokenizer
        self._text = ""
        self._tokens = 0

    def cut(self, new: Sequence[int]) -> Sequence[int] | None:
        """The tokens to go on with in place of these: those within the budget, and the end mark.
        None: the budget is not reached, or the answer does not reason. O(tokens)."""
        room = self._limit.tokens - self._tokens
        self._tokens += len(new)
        self._text += self._detokenizer.feed(new[:room])
        if self._tokens < self._limit.tokens or not self._reasons():
            return None
        return [*new[:room], *self._limit.end_ids]

    @property
    def over(self) -> bool:
        """Whether nothing more can be cut."""
        return self._tokens >= self._limit.tokens

    def _reasons(self) -> bool:
        """Whether the answer is within its reasoning."""
        limit = self._limit
        begun = limit.opened or self._text.lstrip().startswith(limit.start)
        return begun and limit.end not in self._text
