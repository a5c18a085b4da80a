"""Content predictors on requests with lengths that follow from embeddings and words."""

import pickle
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import kendalltau

from services.core import FinishReason
from services.predictor.blend.content import MIN_EXAMPLES_TO_FIT, ContentPredictor
from services.predictor.blend.quantile_cache import MAX_OUTCOMES_BEHIND, QuantileCache
from services.predictor.interface import Example, Options, Query
from services.predictor.models import ridge
from services.predictor.models.fitting import ignore_progress
from services.predictor.models.frame import Frame
from services.predictor.models.nets.crossfit import crossfit
from services.predictor.models.nets.net import Inputs
from services.predictor.models.nets.recipes import CLASSIFY, RANKER
from services.predictor.models.retrieval import EmbeddingIndex, Neighbours
from services.predictor.predictors import BLEND, build
from tests.predictor.blend.made_features import DIM, examples, features, lengths, query


def fit(name: str, train: list[Example]) -> ContentPredictor:
    predictor = build(name, Options())
    assert isinstance(predictor, ContentPredictor)
    assert predictor.learn(train) == len(train)
    predictor.fit()
    return predictor


def tau(predictor: ContentPredictor, asked: list[Example]) -> float:
    means = [f.mean() for f in predictor.forecast([e.query for e in asked])]
    return float(kendalltau(means, lengths(asked)).statistic)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [("retrieval", 0.3), ("retrieval-plain", 0.1), ("ranker", 0.7), ("forest", 0.3),
     ("trees", 0.5), ("ridge", 0.7), ("classify", 0.4), ("proxy", 0.4), ("blend", 0.7)],
)  # fmt: skip
def test_blend_members_find_relevant_features(name: str, least: float) -> None:
    predictor, held = fit(name, examples(600, 1)), examples(300, 2)
    assert tau(predictor, held) > least
    levels = [f.survival(e.output_tokens) for f, e in
              zip(predictor.forecast([e.query for e in held]), held, strict=True)]  # fmt: skip
    assert 0.8 <= np.mean([0.05 <= level <= 0.95 for level in levels]) <= 0.99


@pytest.mark.slow
def test_blend_fit_is_deterministic_and_picklable() -> None:
    train, held = examples(200, 1), [e.query for e in examples(20, 2)]
    predictor = build("blend", Options())
    assert isinstance(predictor, ContentPredictor)
    predictor.learn(train)
    refit = predictor.refit(seed=3)
    assert refit is not None and set(refit.fits) == set(BLEND)
    there = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(refit)).run()))
    predictor.adopt(there)
    first = predictor.forecast(held)
    predictor.adopt(refit.run())
    again = predictor.forecast(held)
    assert [f.mean() for f in first] == pytest.approx([f.mean() for f in again], rel=1e-3)
    assert {f.source for f in first} == {"blend"}


def test_history_answers_before_fit_and_for_unread_prompts() -> None:
    predictor = build("blend", Options())
    assert isinstance(predictor, ContentPredictor)
    few = examples(MIN_EXAMPLES_TO_FIT - 1, 1)
    predictor.learn(few)
    assert predictor.refit() is None
    asked = [few[0].query, query(None)]
    assert [f.source for f in predictor.forecast(asked)] == ["history", "history"]
    predictor.learn(examples(1, 5))
    predictor.fit()
    forecasts = predictor.forecast(asked)
    assert [f.source for f in forecasts] == ["blend", "history"]
    assert forecasts[1].shared_key and not forecasts[0].shared_key


def test_truncated_answers_are_not_learned() -> None:
    predictor = build("blend", Options())
    one = examples(1, 1)[0]
    cut = [Example(one.query, 9, reason) for reason in FinishReason
           if reason not in (FinishReason.STOP, FinishReason.LENGTH)]  # fmt: skip
    assert predictor.learn([*cut, Example(one.query, 0), Example(one.query, 9)]) == 1


@pytest.mark.slow
def test_blend_recalibrates_after_shift_without_refit() -> None:
    """Answers become three times as long; recalibration alone must follow."""
    predictor = fit("blend", examples(600, 1))
    held = examples(300, 4, factor=3.0)
    queries = [e.query for e in held]

    def covered() -> float:
        made = predictor.forecast(queries)
        return float(np.mean([f.quantile(0.05) <= e.output_tokens <= f.quantile(0.95)
                              for f, e in zip(made, held, strict=True)]))  # fmt: skip

    before = covered()
    predictor.learn(examples(800, 3, factor=3.0))
    assert before < 0.5 < 0.75 < covered()


@pytest.mark.slow
def test_blend_applications_have_separate_weights() -> None:
    """Lengths follow the prompt in one application and are random in the other."""
    rng = np.random.default_rng(0)
    noise = [Example(query(e.query.features, "noise"), int(rng.integers(1, 400)))
             for e in examples(500, 9)]  # fmt: skip
    predictor = fit("blend", examples(500, 1) + noise)
    assert predictor.weights("noise")["history"] > predictor.weights("chat")["history"] + 0.1


def test_retrieval_index_evicts_oldest_neighbours() -> None:
    memory = EmbeddingIndex(window=3)
    axes = np.eye(DIM, dtype=np.float32)
    for number in range(5):
        memory.add(axes[[number]], [10.0 * (number + 1)])
    found = memory.find(axes[[0]])
    assert len(memory) == 3
    assert sorted(found.lengths[0]) == [30.0, 40.0, 50.0] and found.best[0] < 0.1


def test_retrieval_neighbours_are_weighted_by_similarity() -> None:
    memory = EmbeddingIndex(window=100)
    near, far = np.eye(DIM, dtype=np.float32)[:2]
    memory.add(np.stack([near, far]), [10.0, 500.0])
    asked = (near + 0.2 * far) / np.linalg.norm(near + 0.2 * far)
    spread = memory.find(asked[None].astype(np.float32)).spread()
    assert np.median(spread) == pytest.approx(10, abs=3)
    assert features(near).user_input.shape == (3, DIM)


def test_unsharpened_retrieval_matches_alise() -> None:
    """ALISE: (0.8 · 100 + 0.6 · 300 + 0.2 · 500) / (0.8 + 0.6 + 0.2) = 360 / 1.6 = 225."""
    found = Neighbours(np.array([[300.0, 100.0, 500.0]]), np.array([[0.6, 0.8, 0.2]]))
    assert found.spread_unsharpened(0.1).mean() == pytest.approx(225, rel=0.03)
    # Above 0.5: (0.6 · 300 + 0.8 · 100) / 1.4. Above 0.9 there is none: all neighbours.
    assert found.spread_unsharpened(0.5).mean() == pytest.approx(186, rel=0.03)
    assert found.spread_unsharpened(0.9).mean() == pytest.approx(225, rel=0.03)
    assert found.spread().mean() < 150  # sharpened weights prefer the nearest
    unlike = Neighbours(np.array([[100.0, 300.0]]), np.array([[-0.5, 0.0]]))
    assert unlike.spread_unsharpened(0.6).mean() == pytest.approx(200, rel=0.03)


def test_fused_nets_equal_separate_nets() -> None:
    train = examples(100, 1)
    frame, targets = Frame.from_queries([e.query for e in train]), lengths(train)
    for recipe in (RANKER, CLASSIFY):
        aims = targets % 7 if recipe is CLASSIFY else targets
        ensemble, _ = crossfit(frame, aims, recipe, 0, lambda _: None)
        inputs = Inputs.of(ensemble.preparation.columns(frame))
        apart = np.mean([net.scores(inputs) for net in ensemble.nets], axis=0)
        assert ensemble.scores(frame) == pytest.approx(apart, abs=1e-4)


def test_quantile_cache_expires_after_enough_outcomes() -> None:
    asked: list[int] = []

    def ask(queries: Sequence[Query]) -> list[np.ndarray]:
        asked.append(len(queries))
        return [np.full((len(queries), 64), float(len(asked))) for _ in range(2)]

    cache, (a, b) = QuantileCache(), [e.query for e in examples(2, 1)]
    assert cache.spreads([a, a], ask)[0][:, 0].tolist() == [1, 1]
    assert cache.spreads([a, b], ask)[1][:, 0].tolist() == [1, 2]
    other = query(a.features, "elsewhere")
    assert cache.spreads([other], ask)[0][0, 0] == 3
    cache.count_outcomes(MAX_OUTCOMES_BEHIND)
    assert cache.spreads([a], ask)[0][0, 0] == 4
    assert asked == [1, 1, 1, 1]


def test_linear_score_equals_matrix_product() -> None:
    frame = Frame.from_queries([e.query for e in examples(80, 1)])
    columns = ridge.DesignMatrix.fit(frame)
    slopes = np.random.default_rng(0).normal(size=columns.matrix(frame).shape[1])
    assert columns.product(frame, slopes) == pytest.approx(columns.matrix(frame) @ slopes, abs=1e-4)


@pytest.mark.parametrize("prompts", [1, 3])
def test_blend_fits_few_repeated_prompts(prompts: int) -> None:
    few = examples(prompts, 1)
    train = [Example(few[i % prompts].query, 20 + i % 7) for i in range(80)]
    predictor = fit("blend", train)
    (forecast,) = predictor.forecast([few[0].query])
    assert forecast.source == "blend" and 18 <= forecast.mean() <= 28


def test_word_model_fits_without_warning() -> None:
    """All embeddings are equal without an encoder."""
    train = examples(300, 1)
    frame = Frame.from_queries([example.query for example in train])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted = ridge.fit_words(frame, lengths(train), 0, ignore_progress)
    assert kendalltau(fitted.out_of_fold.mean(axis=1), lengths(train)).statistic > 0.1


def test_pure_predictor_is_its_single_member_without_recalibration() -> None:
    train, held = examples(200, 1), [e.query for e in examples(20, 2)]
    predictor = build("ridge", Options(pure=True))
    assert isinstance(predictor, ContentPredictor)
    predictor.learn(train)
    assert {f.source for f in predictor.forecast(held)} == {"max"}
    predictor.fit()
    predictor.learn(examples(100, 3))  # outcomes that would recalibrate it
    means = [f.mean() for f in predictor.forecast(held)]
    spread = predictor.members["ridge"].spread(Frame.from_queries(held))
    assert means == pytest.approx(spread.mean(axis=1), abs=0.1)
    assert predictor.by_words(held) == [None] * len(held)


def test_classify_predicts_one_of_ten_classes_of_equal_width() -> None:
    train, held = examples(600, 1), examples(300, 2)
    predictor = build("classify", Options(pure=True))
    assert isinstance(predictor, ContentPredictor)
    predictor.learn(train)
    predictor.fit()
    width = max(lengths(train)) / 10
    forecasts = predictor.forecast([e.query for e in held])
    buckets = [{min(int(point // width), 9) for point in f.points} for f in forecasts]
    assert all(len(each) == 1 for each in buckets)
    found = [each.pop() for each in buckets]
    right = [min(int(e.output_tokens // width), 9) for e in held]
    assert np.mean(np.equal(found, right)) > max(np.bincount(right)) / len(right)
