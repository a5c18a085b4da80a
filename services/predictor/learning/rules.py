"""What of a finished request's prompt enters the training set."""

from collections.abc import Callable

Rule = Callable[[float, int], bool]
"""(mean foretold, tokens generated) → whether it is trained on."""

_APART_TOKENS = 10
_APART_SHARE = 0.1


def everything(mean: float, tokens: int) -> bool:
    return True


def mispredicted(mean: float, tokens: int) -> bool:
    """Magnus (papers/004 §III-B): off by more than 10 tokens and more than 10 % of the length.

    The training set then holds the hard requests more often than they come, so what is fitted to
    it is biased towards them; it stays small, and does not forget them. Everything enters while
    no model has foretold anything (mean 0).
    """
    apart = abs(mean - tokens)
    return not mean or (apart > _APART_TOKENS and apart > _APART_SHARE * tokens)


RULES: dict[str, Rule] = {"all": everything, "mispredicted": mispredicted}
OWN_RULES = {"forest": "mispredicted"}  # as its paper has it; the others learn from all
