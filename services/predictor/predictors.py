"""Predictors by name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.members import FittedMember, HistoryMember, Member
from services.predictor.interface import Options, Predictor
from services.predictor.models.fitting import Fit
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.oracle import OraclePredictor

FITTED = ("ranker", "forest", "trees", "ridge", "classify", "proxy", "words")
ENCODERLESS = frozenset({"words"})  # read words and sizes only, so they need no encoder
BLEND = ("history", "retrieval", "ranker", "forest", "trees", "ridge")


def _fits() -> dict[str, Fit]:
    """Fit functions by name. Imported on first use: PyTorch and scikit-learn take seconds to load
    and history needs neither."""
    from services.predictor.models.forest import fit_forest, fit_trees
    from services.predictor.models.nets.recipes import fit_classify, fit_proxy, fit_ranker
    from services.predictor.models.ridge import fit_ridge, fit_words

    return {
        "ranker": fit_ranker,
        "forest": fit_forest,
        "trees": fit_trees,
        "ridge": fit_ridge,
        "classify": fit_classify,
        "proxy": fit_proxy,
        "words": fit_words,
    }


def _fitted(options: Options, name: str) -> Member:
    return FittedMember(_fits()[name])


def _retrieval(options: Options, sharpened: bool = True) -> Member:
    from services.predictor.models.retrieval import Neighbours, RetrievalMember

    plain = partial(Neighbours.spread_unsharpened, threshold=options.similarity_min)
    to_quantiles = Neighbours.spread if sharpened else plain
    return RetrievalMember(options.neighbours_window, options.similarity_min, to_quantiles)


MEMBERS: dict[str, Callable[[Options], Member]] = {
    "history": HistoryMember,
    "retrieval": _retrieval,
    "retrieval-plain": partial(_retrieval, sharpened=False),  # as ALISE weights neighbours
    **{name: partial(_fitted, name=name) for name in FITTED},
}


READS: dict[str, tuple[str, ...]] = {  # members of each predictor that reads prompts
    **{name: (name,) for name in MEMBERS if name != "history"},
    "blend": BLEND,
}


def build_reading(
    name: str, options: Options, given: Mapping[str, Member] = MappingProxyType({})
) -> ContentPredictor:
    """Builds a predictor of READS; `given` members replace new ones.

    Raises ValueError when the predictor has no such member.
    """
    names = READS.get(name, ())
    if unknown := set(given) - set(names):
        raise ValueError(f"the predictor {name!r} has no {' or '.join(sorted(unknown))}")
    members = {m: given[m] if m in given else MEMBERS[m](options) for m in names}
    by_words = None if options.pure or name in ENCODERLESS else _fits()["words"]
    return ContentPredictor(name, members, options, by_words)


def _seeded(options: Options) -> Predictor:
    """Starts with a window full of `max_tokens`, as in Past-Future (Gong et al., ASPLOS 2025,
    §3.2)."""
    return HistoryPredictor(replace(options, prior=float(options.window)))


PLAIN: dict[str, Callable[[Options], Predictor]] = {
    "history": HistoryPredictor,
    "history-seeded": _seeded,
    "max": lambda _: OraclePredictor(),
    "oracle": lambda options: OraclePredictor(options.lengths()),
}
PREDICTORS = PLAIN | {name: partial(build_reading, name) for name in READS}


def build(name: str, options: Options) -> Predictor:
    """Builds the predictor of that name. Raises ValueError for an unknown name."""
    require_known(name)
    return PREDICTORS[name](options)


def require_known(name: str) -> None:
    """Raises ValueError with the known names unless the name is a predictor's."""
    if name not in PREDICTORS:
        known = ", ".join(sorted(PREDICTORS))
        raise ValueError(f"unknown predictor {name!r}; known: {known}")
