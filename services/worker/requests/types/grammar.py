"""GrammarMatcher: the place of one request's answer in its grammar."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # only an engine that computes loads llguidance
    from llguidance import LLMatcher

Words = NDArray[np.int32]  # masks [..., words]: bit i of word w belongs to token 32·w + i

MAX_REASON = 300  # characters of llguidance's message in a sentence


class GrammarMatcher:
    """A grammar after the first known tokens of an answer.

    All of it follows from these tokens: an answer that is resubmitted or moved begins with a new
    matcher. Once `error` is set, the answer cannot continue; it is a sentence for the user.
    """

    def __init__(self, matcher: "LLMatcher", allowed: Words | None = None):
        """`allowed` [words] are the tokens that the request allows at all; None: any."""
        self.matcher = matcher
        self.allowed = allowed
        self.error = ""
        self.consumed = 0  # output tokens
        self.forced: Seq[int] = ()  # what must follow those consumed, if it was looked up

    def note(self, tokens: Seq[int]) -> None:
        """Notes that `matcher` consumes the next tokens of the answer."""
        if tokens:
            self.consumed += len(tokens)
            self.forced = ()

    def read_error(self) -> None:
        """Sets `error` if the matcher has failed: a token does not fit, or a limit is exceeded."""
        if self.matcher.is_error() and not self.error:
            self.error = cannot_continue(self.matcher.get_error())

    def find_forced(self) -> None:
        """Looks up the tokens that must follow those consumed."""
        self.forced = self.matcher.compute_ff_tokens()

    def continuation(self, tokens: Seq[int], prompt_tokens: int) -> list[int]:
        """The tokens that must follow a request's `tokens`, as far as they were looked up. The
        newest of `tokens` need not be consumed yet."""
        newer, forced = len(tokens) - prompt_tokens - self.consumed, self.forced
        if not 0 <= newer < len(forced) or tokens[len(tokens) - newer :] != forced[:newer]:
            return []
        return list(forced[newer:])


def cannot_continue(why: str) -> str:
    """The sentence for an answer that ends because its grammar cannot be followed further."""
    return f"the answer cannot follow its schema or grammar any further: {short_reason(why)}"


def short_reason(error: str) -> str:
    """What an error of llguidance says first: what follows is the state of its parser."""
    return (error.strip().splitlines() or ["unknown"])[0][:MAX_REASON]
