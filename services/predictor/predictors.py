"""The predictors there are, by name."""

from collections.abc import Callable

from services.predictor.history import HistoryPredictor
from services.predictor.interface import Options, Predictor
from services.predictor.maximum import MaxPredictor

PREDICTORS: dict[str, Callable[[Options], Predictor]] = {
    "history": HistoryPredictor,
    "max": lambda _: MaxPredictor(),
}


def build(name: str, options: Options) -> Predictor:
    """The predictor of that name; raises ValueError listing the known ones."""
    if name not in PREDICTORS:
        known = ", ".join(sorted(PREDICTORS))
        raise ValueError(f"no predictor is called {name!r}; known: {known}")
    return PREDICTORS[name](options)
