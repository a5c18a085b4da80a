"""Predictors by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import MappingProxyType

from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.members import FittedMember, HistoryMember, Member
from services.predictor.interface import Options, Predictor
from services.predictor.models.fitting import Fit, Fitted, ProgressCallback
from services.predictor.models.frame import Frame
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.oracle import OraclePredictor
from services.predictor.models.spread import Floats


@dataclass(frozen=True)
class LateFit:
    """A Fit that is imported when it first fits: PyTorch and scikit-learn take seconds to load,
    and refits run in a process of their own."""

    module: str
    function: str

    def __call__(self, frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
        fit: Fit = getattr(import_module(f"services.predictor.models.{self.module}"), self.function)
        return fit(frame, lengths, seed, tick)


FITS: dict[str, Fit] = {
    "ranker": LateFit("nets.recipes", "fit_ranker"),
    "forest": LateFit("forest", "fit_forest"),
    "trees": LateFit("forest", "fit_trees"),
    "ridge": LateFit("ridge", "fit_ridge"),
    "classify": LateFit("nets.recipes", "fit_classify"),
    "proxy": LateFit("nets.recipes", "fit_proxy"),
    "words": LateFit("ridge", "fit_words"),
}
ENCODERLESS = frozenset({"words"})  # read words and sizes only, so they need no encoder
BLEND = ("history", "retrieval", "ranker", "forest", "trees", "ridge")


def _fitted(options: Options, name: str) -> Member:
    return FittedMember(FITS[name])


def _retrieval(options: Options, sharpened: bool = True) -> Member:
    from services.predictor.models.retrieval import Neighbours, RetrievalMember

    plain = partial(Neighbours.spread_unsharpened, threshold=options.similarity_min)
    to_quantiles = Neighbours.spread if sharpened else plain
    return RetrievalMember(options.neighbours_window, options.similarity_min, to_quantiles)


MEMBERS: dict[str, Callable[[Options], Member]] = {
    "history": HistoryMember,
    "retrieval": _retrieval,
    "retrieval-plain": partial(_retrieval, sharpened=False),  # as ALISE weights neighbours
    **{name: partial(_fitted, name=name) for name in FITS},
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
    by_words = None if options.pure or name in ENCODERLESS else FITS["words"]
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
