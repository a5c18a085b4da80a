"""Rules that select finished prompts for the training set."""

from collections.abc import Callable

Rule = Callable[[float, int], bool]
"""(forecast mean, tokens generated) → whether to train on the prompt."""

_MIN_ERROR_TOKENS = 10
_MIN_ERROR_SHARE = 0.1


def everything(mean: float, tokens: int) -> bool:
    return True


def mispredicted(mean: float, tokens: int) -> bool:
    """Selects forecasts off by more than 10 tokens and more than 10 % of the length.

    Magnus (Cheng et al., ICWS 2024), §III-B. The training set stays small and over-represents hard
    requests. Everything is selected while no model has made a forecast (mean 0).
    """
    error = abs(mean - tokens)
    return not mean or (error > _MIN_ERROR_TOKENS and error > _MIN_ERROR_SHARE * tokens)


RULES: dict[str, Rule] = {"all": everything, "mispredicted": mispredicted}
DEFAULT_RULES = {"forest": "mispredicted"}  # of Magnus; other models learn from everything
