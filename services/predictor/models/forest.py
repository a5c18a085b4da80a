"""Quantile forests: Magnus' forest on compressed embeddings, and extra-trees on principal axes."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import ExtraTreesRegressor, RandomForestRegressor

from services.predictor.models.axes import Axes, ranks
from services.predictor.models.fitting import PARTS, Fitted, ProgressCallback, Rows, cross_fit
from services.predictor.models.frame import Frame, sentences
from services.predictor.models.spread import Floats, from_samples

INSTRUCTION_VALUES = 4  # d_app and d_user of Magnus (Cheng et al., ICWS 2024), §III-B
USER_INPUT_VALUES = 16

_TREES = 64 // PARTS  # per part
_LEAF = 5  # minimum requests per leaf
_SAMPLES = 8  # quantiles per leaf
_AXES = 64  # principal axes of the encoder states
_LEAF_LEVELS = (np.arange(_SAMPLES) + 0.5) / _SAMPLES


class Tree(Protocol):
    """The part of scikit-learn's tree that is used."""

    node_count: int

    def apply(self, columns: NDArray[np.float32]) -> NDArray[np.int64]:
        """Leaf of each row."""
        ...


@dataclass(frozen=True)
class QuantileForest:
    """Trees with a few quantiles of the training lengths in each node.

    A quantile forest (Meinshausen, JMLR 2006): the forecast is the distribution of all reached
    leaves' lengths. A few samples per leaf answer a request in 0.2 ms; the package quantile-forest
    looks up every training length and takes 12 ms.
    """

    trees: tuple[Tree, ...]
    samples: tuple[Floats, ...]  # per tree: [nodes, _SAMPLES]

    def spread(self, columns: NDArray[np.float32]) -> Floats:
        """[n, columns] → [n, 64]. O(n · trees · depth)."""
        leaves = [tree.apply(columns) for tree in self.trees]
        drawn = [samples[leaf] for samples, leaf in zip(self.samples, leaves, strict=True)]
        return from_samples(np.concatenate(drawn, axis=1))


def grow(
    forest: RandomForestRegressor | ExtraTreesRegressor,
    columns: NDArray[np.float32],
    targets: Floats,
    lengths: Floats,
) -> QuantileForest:
    """Fits the forest to `targets` and stores the `lengths` of each leaf."""
    forest.fit(columns, targets)
    trees = tuple(estimator.tree_ for estimator in forest.estimators_)
    return QuantileForest(trees, tuple(_leaf_samples(tree, columns, lengths) for tree in trees))


def _leaf_samples(tree: Tree, columns: NDArray[np.float32], lengths: Floats) -> Floats:
    leaves = tree.apply(columns)
    order = np.lexsort((lengths, leaves))
    nodes, starts, counts = np.unique(leaves[order], return_index=True, return_counts=True)
    at = starts[:, None] + np.minimum(_LEAF_LEVELS * counts[:, None], counts[:, None] - 1)
    samples = np.ones((tree.node_count, _SAMPLES))
    samples[nodes] = lengths[order][at.astype(int)]
    return samples


def fold_vectors(vectors: NDArray[np.floating], values: int) -> NDArray[np.float32]:
    """Magnus' compression module (Cheng et al., ICWS 2024, §III-B, Fig. 8): vectors [n, dim] → [n,
    values].

    Each of `values` groups of neighbouring columns becomes its sum over the square root of its
    size; sizes differ by at most one. Raises ValueError unless 1 ≤ values ≤ dim. O(n · dim).
    """
    dim = vectors.shape[1]
    if not 1 <= values <= dim:
        raise ValueError(f"cannot fold {dim} values to {values}")
    edges = np.linspace(0, dim, values + 1).astype(np.int64)
    sums = np.add.reduceat(np.asarray(vectors, np.float64), edges[:-1], axis=1)
    return (sums / np.sqrt(np.diff(edges))).astype(np.float32)


def magnus_columns(frame: Frame) -> NDArray[np.float32]:
    """Inputs of Magnus' forest (§III-B): instruction in 4 values, user input in 16, and sizes.

    The paper uses the user input's length only; conversations also need the other sizes.
    """
    return np.concatenate(
        [
            fold_vectors(sentences(frame.instruction), INSTRUCTION_VALUES),
            fold_vectors(sentences(frame.user_input), USER_INPUT_VALUES),
            frame.numbers,
        ],
        axis=1,
    )


@dataclass(frozen=True)
class Forest:
    """Magnus' forest."""

    fitted: QuantileForest

    def spread(self, frame: Frame) -> Floats:
        return self.fitted.spread(magnus_columns(frame))


def fit_forest(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    """Fits Magnus' random forest regressor of the length (Cheng et al., ICWS 2024, §III-B)."""
    columns = magnus_columns(frame)

    def fit(rows: Rows) -> QuantileForest:
        forest = RandomForestRegressor(
            _TREES, min_samples_leaf=_LEAF, max_features=0.5, random_state=seed
        )
        return grow(forest, columns[rows], lengths[rows], lengths[rows])

    fitted, out_of_fold = cross_fit(frame, seed, tick, fit, lambda g, rows: g.spread(columns[rows]))
    return Fitted(Forest(_merge(fitted)), out_of_fold)


@dataclass(frozen=True)
class Trees:
    """Extra-trees on the principal axes."""

    axes: Axes
    fitted: QuantileForest

    def spread(self, frame: Frame) -> Floats:
        return self.fitted.spread(self.axes.columns(frame))


def fit_trees(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    """Fits extremely randomised trees (Geurts et al., Machine Learning 2006) of the length's rank,
    which work well with few examples."""
    axes = Axes.fit(frame, _AXES)
    columns = axes.columns(frame)

    def fit(rows: Rows) -> QuantileForest:
        forest = ExtraTreesRegressor(
            _TREES, min_samples_leaf=_LEAF, max_features=0.3, random_state=seed
        )
        return grow(forest, columns[rows], ranks(lengths[rows]), lengths[rows])

    fitted, out_of_fold = cross_fit(frame, seed, tick, fit, lambda g, rows: g.spread(columns[rows]))
    return Fitted(Trees(axes, _merge(fitted)), out_of_fold)


def _merge(fitted: list[QuantileForest]) -> QuantileForest:
    return QuantileForest(
        tuple(tree for g in fitted for tree in g.trees),
        tuple(samples for g in fitted for samples in g.samples),
    )
