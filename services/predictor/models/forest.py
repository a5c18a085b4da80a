"""Forests whose leaves are samples: Magnus' on folded meaning, and ours on more of it."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.ensemble import ExtraTreesRegressor, RandomForestRegressor

from services.predictor.models.fitting import PARTS, Fitted, Rows, Tick, by_parts
from services.predictor.models.frame import Frame, sentences
from services.predictor.models.spread import Floats, of_samples

INSTRUCTION_VALUES = 4  # d_app and d_user of papers/004 §III-B
USER_INPUT_VALUES = 16

_TREES = 64 // PARTS  # a part
_LEAF = 5  # requests at least
_SAMPLES = 8  # quantiles kept of a leaf's lengths
_AXES = 64  # principal ones of the encoder's states
_LEAF_LEVELS = (np.arange(_SAMPLES) + 0.5) / _SAMPLES


class Tree(Protocol):
    """What of scikit-learn's own tree is used."""

    node_count: int

    def apply(self, columns: NDArray[np.float32]) -> NDArray[np.int64]:
        """The leaf of each row."""
        ...


@dataclass(frozen=True)
class Grown:
    """Trees, and a few quantiles of the training lengths in each of their nodes.

    A quantile forest (Meinshausen 2006): the spread is that of all leaves' lengths together. Few
    samples a leaf answer one request in 0.2 ms, where the package quantile-forest, which looks up
    every training length, takes 12.
    """

    trees: tuple[Tree, ...]
    samples: tuple[Floats, ...]  # a tree: [nodes, _SAMPLES]

    def spread(self, columns: NDArray[np.float32]) -> Floats:
        """[n, columns] → [n, 64]. O(n · trees · depth)."""
        leaves = [tree.apply(columns) for tree in self.trees]
        drawn = [samples[leaf] for samples, leaf in zip(self.samples, leaves, strict=True)]
        return of_samples(np.concatenate(drawn, axis=1))


def grow(
    forest: RandomForestRegressor | ExtraTreesRegressor,
    columns: NDArray[np.float32],
    targets: Floats,
    lengths: Floats,
) -> Grown:
    """Fits the forest to `targets`, and keeps the `lengths` that ended in each leaf."""
    forest.fit(columns, targets)
    trees = tuple(estimator.tree_ for estimator in forest.estimators_)
    return Grown(trees, tuple(_leaf_samples(tree, columns, lengths) for tree in trees))


def _leaf_samples(tree: Tree, columns: NDArray[np.float32], lengths: Floats) -> Floats:
    leaves = tree.apply(columns)
    order = np.lexsort((lengths, leaves))
    nodes, starts, counts = np.unique(leaves[order], return_index=True, return_counts=True)
    at = starts[:, None] + np.minimum(_LEAF_LEVELS * counts[:, None], counts[:, None] - 1)
    samples = np.ones((tree.node_count, _SAMPLES))
    samples[nodes] = lengths[order][at.astype(int)]
    return samples


def fold(vectors: NDArray[np.floating], values: int) -> NDArray[np.float32]:
    """Magnus' compression module: vectors [n, dim] folded to [n, values]
    (papers/004 §III-B, Fig. 8).

    The columns are cut into `values` neighbouring groups of equal size (sizes differ by at most
    one where `values` does not divide dim); each group becomes its sum over the square root of
    its size. Raises ValueError unless 1 ≤ values ≤ dim. O(n · dim).
    """
    dim = vectors.shape[1]
    if not 1 <= values <= dim:
        raise ValueError(f"cannot fold {dim} values to {values}")
    edges = np.linspace(0, dim, values + 1).astype(np.int64)
    sums = np.add.reduceat(np.asarray(vectors, np.float64), edges[:-1], axis=1)
    return (sums / np.sqrt(np.diff(edges))).astype(np.float32)


def magnus_columns(frame: Frame) -> NDArray[np.float32]:
    """Instruction folded to 4 values, user input to 16, and the sizes (papers/004 §III-B).

    Beside the paper's user-input length: the other sizes, which chats and several turns need.
    """
    return np.concatenate(
        [
            fold(sentences(frame.instruction), INSTRUCTION_VALUES),
            fold(sentences(frame.user_input), USER_INPUT_VALUES),
            frame.numbers,
        ],
        axis=1,
    )


@dataclass(frozen=True)
class Forest:
    """Magnus' forest."""

    grown: Grown

    def spread(self, frame: Frame) -> Floats:
        return self.grown.spread(magnus_columns(frame))


def fit_forest(frame: Frame, lengths: Floats, seed: int, tick: Tick) -> Fitted:
    """papers/004 §III-B: a random forest regressor of the length."""
    columns = magnus_columns(frame)

    def fit(rows: Rows) -> Grown:
        forest = RandomForestRegressor(
            _TREES, min_samples_leaf=_LEAF, max_features=0.5, random_state=seed
        )
        return grow(forest, columns[rows], lengths[rows], lengths[rows])

    grown, unseen = by_parts(frame, seed, tick, fit, lambda g, rows: g.spread(columns[rows]))
    return Fitted(Forest(_joined(grown)), unseen)


@dataclass(frozen=True)
class Axes:
    """Principal axes of the encoder's states, and one column a known name."""

    middle: NDArray[np.float32]
    deviation: NDArray[np.float32]
    axes: NDArray[np.float32]  # [states, axes]
    names: tuple[tuple[str, ...], tuple[str, ...]]  # models, applications

    @staticmethod
    def fit(frame: Frame, count: int) -> "Axes":
        states = _states(frame)
        middle, deviation = states.mean(axis=0), states.std(axis=0) + 1e-4
        scaled = (states - middle) / deviation
        most = min(count, *scaled.shape)
        with np.errstate(invalid="ignore"):  # states all alike, as where none are read, explain 0/0
            found = PCA(most, random_state=0).fit(scaled)  # a third of eigh's time
        known = (tuple(sorted(set(frame.models))), tuple(sorted(set(frame.applications))))
        return Axes(middle, deviation, np.ascontiguousarray(found.components_.T), known)

    def columns(self, frame: Frame) -> NDArray[np.float32]:
        scaled = (_states(frame) - self.middle) / self.deviation
        given = zip((frame.models, frame.applications), self.names, strict=True)
        named = [np.array([[n == k for k in known] for n in names]) for names, known in given]
        flags = [n.reshape(len(frame), -1).astype(np.float32) for n in named]
        return np.concatenate([scaled @ self.axes, frame.numbers, *flags], axis=1)


@dataclass(frozen=True)
class Trees:
    """Extra-trees on the principal axes."""

    axes: Axes
    grown: Grown

    def spread(self, frame: Frame) -> Floats:
        return self.grown.spread(self.axes.columns(frame))


def fit_trees(frame: Frame, lengths: Floats, seed: int, tick: Tick) -> Fitted:
    """Extremely randomised trees (Geurts 2006) of the length's rank: good from few examples."""
    axes = Axes.fit(frame, _AXES)
    columns = axes.columns(frame)

    def fit(rows: Rows) -> Grown:
        forest = ExtraTreesRegressor(
            _TREES, min_samples_leaf=_LEAF, max_features=0.3, random_state=seed
        )
        return grow(forest, columns[rows], ranks(lengths[rows]), lengths[rows])

    grown, unseen = by_parts(frame, seed, tick, fit, lambda g, rows: g.spread(columns[rows]))
    return Fitted(Trees(axes, _joined(grown)), unseen)


def ranks(lengths: Floats) -> Floats:
    """Each length's rank in (0, 1); equal lengths share the mean of theirs."""
    _, inverse, counts = np.unique(lengths, return_inverse=True, return_counts=True)
    return np.asarray(((np.cumsum(counts) - counts / 2) / len(lengths))[inverse], float)


def _states(frame: Frame) -> NDArray[np.float32]:
    n = len(frame)
    return np.concatenate(
        [frame.instruction.reshape(n, -1), frame.user_input.reshape(n, -1)], axis=1
    )


def _joined(grown: list[Grown]) -> Grown:
    return Grown(
        tuple(tree for g in grown for tree in g.trees),
        tuple(samples for g in grown for samples in g.samples),
    )
