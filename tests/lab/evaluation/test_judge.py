"""Evaluation of predictors: training, queries and timing, in order."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.data.examples import examples_of, extract_all, prompt_of, query_of
from lab.data.feature_store import FeatureStore
from lab.data.rows import Row
from lab.data.split import is_validation
from lab.evaluation.judge import JudgedSet, Judgement, PredictorEvaluator
from lab.evaluation.magnus_ladder import (
    Requests,
    ladder_forecasts,
    requests_of,
    rmse_of,
    sample_rows_per_task,
    user_input_tokens,
)
from lab.evaluation.timing import time_forecasts
from services.core import FinishReason, LiveAnswers
from services.forecast import Forecast, certain
from services.predictor.interface import LAYERS, NUMBERS, Example, Features, Prompt, Query
from services.predictor.models.oracle import OraclePredictor
from services.predictor.models.spread import Floats

DIM = 16
STORED = [Prompt("", text, 1, ()) for text in ("a", "bc", "def")]


def quiet(what: str, done: int, of: int) -> None:
    """Ignores progress."""


def row(i: int, tokens: int = 7, cap: int = 0) -> Row:
    return Row("set", f"r-{i}", f"prompt {i}", "m", "chat/easy", 4, tokens, cap=cap)


def features_of(prompt: Prompt) -> Features:
    """Features that depend on the prompt only."""
    rng = np.random.default_rng(list(prompt.user_input.encode()))
    words = np.unique(rng.integers(0, 100, rng.integers(0, 9))).astype(np.int32)
    instruction = np.full((LAYERS, DIM), len(prompt.instruction), np.float32)
    numbers = np.zeros(len(NUMBERS), np.float32)
    return Features(instruction, rng.random((LAYERS, DIM), np.float32), words, numbers)


class Extractor:
    """Records the prompts it receives."""

    def __init__(self, read: list[str]):
        self._prompts = read

    def extract(self, prompts: Sequence[Prompt], /) -> list[Features]:
        self._prompts += [prompt.user_input for prompt in prompts]
        return [features_of(prompt) for prompt in prompts]


class Recorder:
    """Records its calls; forecasts the mean of the learned lengths."""

    version = 0

    def __init__(self, calls: list[str]):
        self._calls = calls
        self._lengths: list[int] = []

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        self._calls.append(f"forecast {len(batch)}")
        return [certain(round(np.mean(self._lengths)))] * len(batch)

    def learn(self, examples: Sequence[Example]) -> int:
        self._calls.append(f"learned {len(examples)}")
        self._lengths += [example.output_tokens for example in examples]
        return len(examples)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Does nothing."""

    def fit(self, tick: Callable[[float], None]) -> None:
        tick(0.5)
        self._calls.append("fitted")


def judged(name: str, in_domain: bool, rows: Sequence[Row]) -> JudgedSet:
    return JudgedSet(name, in_domain, rows, examples_of(rows, {}, 100))


def evaluator(
    train: Sequence[Row], sets: Sequence[JudgedSet], online: int = 0
) -> PredictorEvaluator:
    return PredictorEvaluator(examples_of(train, {}, 100), sets, 100, online, 0, None, quiet)


def without_timing(calls: Iterable[str]) -> list[str]:
    return [call for call in calls if call != "forecast 1"]


def test_evaluator_learns_fits_then_forecasts_in_batches():
    calls: list[str] = []
    part = judged("set", True, [row(i) for i in range(70)])
    [found] = evaluator([row(i) for i in range(300)], [part]).judge(
        "recorder", lambda: Recorder(calls)
    )
    assert calls[:5] == ["learned 256", "learned 44", "fitted", "forecast 64", "forecast 6"]
    assert "learned" not in " ".join(calls[5:])
    assert (found.data, found.predictor, found.n_train, found.scores.n) == (
        "set",
        "recorder",
        300,
        70,
    )
    assert found.scores.rmse == 0
    assert found.online is None


def test_out_of_domain_set_is_learned_online_separately():
    calls: list[str] = []
    rows = [row(i, tokens=50) for i in range(800)]
    sets = [judged("b", False, rows), judged("c", False, rows)]
    train = [row(i, tokens=10) for i in range(900, 910)]
    first, second = evaluator(train, sets, online=300).judge("recorder", lambda: Recorder(calls))
    held = sum(is_validation(r.prompt) for r in rows)
    for found in (first, second):
        assert found.scores.rmse == 40
        assert found.online is not None
        assert (found.online.outcomes, found.online.scores.n) == (300, held)
        mean = round((300 * 50 + 10 * 10) / 310)
        assert found.online.scores.mae == 50 - mean
    training = ["learned 10", "fitted"]
    online = ["learned 50"] * 5 + ["fitted", "learned 50", "fitted"]
    learning = [call for call in calls if not call.startswith("forecast")]
    assert learning == [*training, *online, *training, *online]


def test_online_learning_excludes_validation_rows():
    learned: list[Example] = []

    class ExampleRecorder(Recorder):
        def learn(self, examples: Sequence[Example]) -> int:
            learned.extend(examples)
            return super().learn(examples)

    rows = [row(i, tokens=i + 1) for i in range(60)]
    part = judged("b", False, rows)
    [found] = evaluator([row(99)], [part], online=1000).judge(
        "recorder", lambda: ExampleRecorder([])
    )
    held = {r.output_tokens for r in rows if is_validation(r.prompt)}
    assert found.online is not None
    assert found.online.outcomes == 60 - len(held)
    assert not held & {example.output_tokens for example in learned[1:]}


def test_forecast_is_truncated_at_max_tokens():
    part = judged("set", True, [row(0, tokens=30, cap=30)])
    [found] = evaluator([row(1, tokens=90)], [part]).judge("recorder", lambda: Recorder([]))
    assert found.scores.mae == 0


def test_oracle_is_perfect():
    part = judged("set", True, [row(i, tokens=i + 1) for i in range(5)])
    [found] = evaluator([row(9)], [part]).judge_oracle()
    assert isinstance(found, Judgement)
    assert (found.predictor, found.n_train, found.timing) == ("oracle", 0, None)
    assert found.scores.tau == pytest.approx(1)
    assert found.scores.rmse == 0


def test_example_is_built_from_row():
    whole, cut = examples_of([row(0), row(1, tokens=20, cap=20)], {}, 100)
    assert whole == Example(Query("m", "chat", 4, 100), 7, FinishReason.STOP)
    assert cut == Example(Query("m", "chat", 4, 20), 20, FinishReason.LENGTH)


def test_prompt_includes_conversation():
    later = Row("d", "c-2", "Sum:\n1 and 1", "m", "t", 4, 7, 30, answers=(5,))
    assert prompt_of(later) == Prompt("", "Sum:\n1 and 1", 34, (5,))


def test_equal_prompts_are_extracted_once_by_length():
    read: list[str] = []
    prompts = [Prompt("", text, 1, ()) for text in ("long prompt", "b", "a", "b")]
    found = extract_all(prompts, Extractor(read), quiet)
    assert read == ["a", "b", "long prompt"]
    assert [f.user_input[0, 0] for f in found] == [features_of(p).user_input[0, 0] for p in prompts]


def test_timing_uses_at_least_200_new_prompts():
    read: list[list[str]] = []

    def fresh() -> Extractor:
        read.append([])
        return Extractor(read[-1])

    calls: list[str] = []
    recording = Recorder(calls)
    recording.learn(examples_of([row(0)], {}, 100))
    timing = time_forecasts(recording, [row(i) for i in range(150)], 100, fresh)
    assert min(timing.ms_batch1, timing.ms_cached, timing.ms_batch64) > 0
    prompts = [f"prompt {i}" for i in range(150)]
    warm_up, timed = read[::2], read[1::2]
    assert warm_up == [["prompt 149"]] * 3
    assert timed == [prompts * 2, prompts * 2, prompts[:128]]
    assert calls.count("forecast 64") == 2


class TestStore:
    def get(self, folder: Path, made: list[int], encoder: str = "enc") -> list[Features]:
        def make(prompts: Sequence[Prompt]) -> list[Features]:
            made.append(len(prompts))
            return [features_of(prompt) for prompt in prompts]

        return FeatureStore(folder, encoder).get(STORED, make)

    def test_feature_store_round_trips(self, tmp_path: Path):
        made: list[int] = []
        first, second = self.get(tmp_path, made), self.get(tmp_path, made)
        assert made == [3]
        for a, b in zip(first, second, strict=True):
            for name in ("instruction", "user_input", "words", "numbers"):
                assert np.array_equal(getattr(a, name), getattr(b, name))
                assert getattr(a, name).dtype == getattr(b, name).dtype

    def test_feature_store_separates_encoders(self, tmp_path: Path):
        made: list[int] = []
        self.get(tmp_path, made)
        self.get(tmp_path, made, "other")
        assert made == [3, 3]

    def test_feature_store_replaces_broken_file(self, tmp_path: Path):
        made: list[int] = []
        self.get(tmp_path, made)
        [path] = tmp_path.iterdir()
        path.write_bytes(path.read_bytes()[:50])
        self.get(tmp_path, made)
        self.get(tmp_path, made)
        assert made == [3, 3]


def test_input_ladder_error_decreases_with_more_inputs():
    """One task doubles the input, one halves it, and the user input's first value adds 40."""
    rng = np.random.default_rng(0)
    tasks = np.array(["double", "halve"] * 600)
    length = rng.integers(20, 100, 1200).astype(float)
    loud = rng.integers(0, 2, 1200)
    instruction = np.zeros((1200, DIM), np.float32)
    instruction[:, 0] = tasks == "double"
    user_input = np.zeros((1200, DIM), np.float32)
    user_input[:, 0] = loud
    output: Floats = np.where(tasks == "double", 2 * length, length / 2) + 40 * loud

    def part(chosen: slice) -> Requests:
        return Requests(
            [*tasks[chosen]],
            length[chosen],
            output[chosen],
            instruction[chosen],
            user_input[chosen],
        )

    test = part(slice(800, None))
    forecasts = ladder_forecasts(part(slice(800)), test)
    assert list(forecasts) == ["UILO", "RAFT", "INST", "USIN"]
    rmse = rmse_of(forecasts, test.output_tokens, np.full(400, True))
    assert rmse["UILO"] > 40
    assert 18 < rmse["RAFT"] < 24  # task and length leave an error of ±20
    assert 18 < rmse["INST"] < 24
    assert rmse["USIN"] < 4


def test_unknown_task_uses_forest_of_all_tasks():
    ones = np.ones((20, DIM), np.float32)
    train = Requests(["a"] * 20, np.full(20, 9.0), np.full(20, 30.0), ones, ones)
    test = Requests(["b"], np.array([9.0]), np.array([1.0]), ones[:1], ones[:1])
    forecasts = ladder_forecasts(train, test)
    assert forecasts["RAFT"] == pytest.approx([30.0])
    assert rmse_of(forecasts, test.output_tokens, np.array([True]))["UILO"] == 8


def test_rows_per_task_are_limited():
    rows = [replace(row(i), task=("rare", "often")[i > 3]) for i in range(50)]
    chosen = sample_rows_per_task(rows, 10, 0)
    assert Counter(r.task for r in chosen) == {"rare": 4, "often": 10}
    assert chosen == sample_rows_per_task(rows, 10, 0)
    assert len({r.id for r in chosen}) == 14


def test_user_input_tokens_exclude_instruction():
    later = Row("d", "x", "Fix the bug:\ncode", "m", "t", 10, 1)
    assert user_input_tokens(later) == 6  # "Fix", "the", "bug" and ":" are subtracted
    assert user_input_tokens(row(0)) == 4
    requests = requests_of([later], [features_of(prompt_of(later))])
    assert requests.instruction.shape == (1, DIM)
    assert list(requests.user_input_tokens) == [6]


def test_forecast_timing_clears_the_cache() -> None:
    """Evaluation has queried every prompt before, so a caching predictor must clear its cache."""

    class CachingPredictor(OraclePredictor):
        def __init__(self) -> None:
            self.cached: set[int] = set()
            self.new: list[int] = []

        def forget(self) -> None:
            self.cached.clear()

        def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
            tokens = [query.prompt_tokens for query in batch]
            self.new.append(len(set(tokens) - self.cached))
            self.cached |= set(tokens)
            return super().forecast(batch)

    predictor = CachingPredictor()
    rows = [replace(row(i), prompt=f"prompt {i}", input_tokens=i) for i in range(250)]
    predictor.forecast([query_of(each, None, 100) for each in rows])
    time_forecasts(predictor, rows, 100, None)
    singles, again = predictor.new[2:202], predictor.new[202:402]
    assert singles == [1] * 200 and again == [0] * 200
    assert predictor.new[403:] == [64] * 3
