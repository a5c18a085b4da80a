"""Learning: pending forecasts, log rows, refits and replay."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos.generated import predictor_pb2
from services.core import FinishReason, Outcome
from services.encoder.source import DEFAULT_NAME
from services.forecast import UNCAPPED, certain
from services.predictor.blend.content import ContentPredictor, Refit, Refitted
from services.predictor.blend.guarded_forecaster import ForecastPair
from services.predictor.blend.members import HistoryMember
from services.predictor.blend.mixture import Mixture
from services.predictor.encoder.extract import Extractor
from services.predictor.encoder.packing import pack
from services.predictor.interface import Example, Options, Prompt, Query
from services.predictor.learning.records import EncodedBy, decode, encode
from services.predictor.learning.refit_process import (
    FitFailed,
    read_result,
    read_task,
    run_in_process,
    write_result,
    write_task,
)
from services.predictor.learning.refitter import Refitter
from services.predictor.learning.rules import DEFAULT_RULES, RULES
from services.predictor.learning.schedule import RefitSchedule
from services.predictor.models.fitting import Fitted, ProgressCallback
from services.predictor.models.frame import Frame
from services.predictor.models.spread import Floats
from services.predictor.serving.executor import CpuBudgetedExecutor
from services.predictor.serving.pending import PendingForecast, PendingForecasts
from services.runtime.outcomelog import Row
from services.runtime.outcomelog.config import LogConfig
from services.runtime.outcomelog.sqlite import SqliteLog
from tests.predictor.predictor_serving import (
    HashEncoder,
    ended,
    input_of,
    mean,
    predicting,
    real_encoder,
    requests,
)
from tests.reach import until

FEATURES = Extractor(HashEncoder()).extract([Prompt("be brief", "hello", 5)])[0]
MADE = ForecastPair(certain(30, "model"), certain(20, "history"), certain(30, "model"))
OUTCOME = Outcome("r", "demo", "chat", 12, 34, 99, FinishReason.STOP, 1.0, 0)
YES = input_of("a", "Say yes or no: is 77 an even number?")
ESSAY = input_of("b", "Write a long essay about the history of the number 77.")
BY = EncodedBy("minilm", FEATURES.instruction.shape)


# Pending forecasts


def test_pending_requests_evict_oldest_and_count_it() -> None:
    pending = PendingForecasts(2)
    for name in "abc":
        pending.put(name, PendingForecast(MADE))
    assert (len(pending), pending.dropped, pending.pop("a")) == (2, 1, None)
    assert pending.pop("b") == PendingForecast(MADE)
    assert pending.pop("b") is None


def test_pending_request_keeps_its_first_forecast() -> None:
    pending = PendingForecasts(2)
    pending.put("a", PendingForecast(MADE, b"features"))
    pending.put("a", PendingForecast(MADE))
    assert pending.pop("a") == PendingForecast(MADE, b"features")
    pending.put("", PendingForecast(MADE))
    assert len(pending) == 0


# Rows


def test_log_row_has_features_but_no_text() -> None:
    prompt = Prompt("be brief", "hello", 5, (7,))
    row = encode(OUTCOME, PendingForecast(MADE, pack(FEATURES)), "minilm", "w1", 1.5e9)
    record = decode(row, BY)
    assert (record.writer, record.forecast_mean) == ("w1", 30)
    example = record.example
    assert (example.output_tokens, example.reason) == (34, FinishReason.STOP)
    query = example.query
    assert (query.model, query.application, query.prompt_tokens, query.max_tokens) == (
        "demo", "chat", 12, 99,
    )  # fmt: skip
    assert query.features is not None
    np.testing.assert_array_equal(query.features.words, FEATURES.words)
    np.testing.assert_allclose(query.features.user_input, FEATURES.user_input, atol=1e-3)
    assert b"hello" not in row.payload
    kept = encode(OUTCOME, PendingForecast(MADE, b"", prompt), "minilm", "w1", 1.5e9)
    text = predictor_pb2.OutcomeRecord.FromString(kept.payload).text
    assert (text.instruction, text.user_input, list(text.answer_tokens)) == (
        "be brief", "hello", [7],
    )  # fmt: skip


@pytest.mark.parametrize("by", [None, EncodedBy("labse", BY.shape), EncodedBy("minilm", (3, 768))])
def test_features_of_other_encoder_are_ignored(by: EncodedBy | None) -> None:
    row = encode(OUTCOME, PendingForecast(MADE, pack(FEATURES)), "minilm", "w1", 0)
    example = decode(row, by).example
    assert (example.query.features, example.output_tokens) == (None, 34)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"output_tokens": 2**31}, "exceeds the token limit"),
        ({"model": "m" * 257}, "name that is too long"),
        ({"foretold_mean": float("nan")}, "invalid forecast"),
        ({"features": b"\x02junk", "encoder": "minilm"}, "features"),
    ],
)
def test_invalid_log_rows_are_rejected(fields: dict[str, Any], sentence: str) -> None:
    payload = predictor_pb2.OutcomeRecord(**fields).SerializeToString()
    with pytest.raises(ValueError, match=sentence):
        decode(Row("outcome", 1, payload), BY)
    with pytest.raises(ValueError, match="is not an outcome record"):
        decode(Row("outcome", 1, b"\xff\xff"), BY)


@pytest.mark.parametrize(
    ("forecast_of", "tokens", "enters"),
    [
        (0, 50, True),  # no forecast
        (50, 60, False),  # off by exactly 10 tokens
        (50, 61, True),
        (200, 220, False),  # 20 tokens, but 9 % of 220
        (200, 180, True),  # 20 tokens, 11 % of 180
        (30, 30, False),
    ],
)
def test_magnus_rule_selects_mispredicted_prompts(
    forecast_of: float, tokens: int, enters: bool
) -> None:
    assert RULES["mispredicted"](forecast_of, tokens) is enters
    assert RULES["all"](forecast_of, tokens)
    assert set(DEFAULT_RULES.values()) <= set(RULES)


# Fitting


class CountingPredictor:
    """A predictor that counts its fits."""

    def __init__(self, pending: int):
        self.pending = pending
        self.asked = 0
        self.adopted: list[int] = []

    def refit(self, seed: int = 0) -> Refit | None:
        self.asked += 1
        taken, self.pending = self.pending, 0
        return Refit({}, (), seed) if taken or self.asked > 1 else None

    def adopt(self, refitted: Refitted) -> None:
        self.adopted.append(refitted.examples)


def refitted(examples: int) -> Refitted:
    return Refitted({}, Mixture(0), examples)


PACE = RefitSchedule(interval_s=0.01, examples_min=64, new_min=50, new_share=0.05, seed=0)


async def refitting(
    asked: CountingPredictor, results: Sequence[Refitted | str], examples: int = 64
) -> list:
    """Returns the results of all refits after a few more checks."""
    left, ends = list(results), []

    async def run(refit: Refit) -> Refitted:
        result = left.pop(0)
        if isinstance(result, str):
            raise FitFailed(result)
        return result

    executor = CpuBudgetedExecutor(share=1, saved_s=1)
    refitter = Refitter(asked, PACE, run, lambda result, _: ends.append(result), executor)
    task = asyncio.create_task(refitter.run(lambda: examples))
    await until(lambda: not left)
    await asyncio.sleep(0.05)
    task.cancel()
    executor.close()
    assert refitter.version == len(asked.adopted)
    return ends


async def test_refit_is_due_after_enough_new_examples() -> None:
    for pending, results in ((49, []), (50, [refitted(50)])):
        asked = CountingPredictor(pending)
        assert await refitting(asked, results) == ["adopted"] * len(results)
    assert await refitting(CountingPredictor(50), [], examples=63) == []


async def test_refit_needs_share_of_new_examples() -> None:
    asked = CountingPredictor(50)

    async def more(count: int) -> None:
        await until(lambda: bool(asked.adopted))
        asked.pending = count

    for count, fits in ((99, 1), (100, 2)):
        asked = CountingPredictor(50)
        results = [refitted(2_000)] * fits
        _, ends = await asyncio.gather(more(count), refitting(asked, results))
        assert ends == ["adopted"] * fits


async def test_failed_fit_is_retried_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    ends = await refitting(CountingPredictor(50), ["status -9", refitted(50)])
    assert ends == ["failed", "adopted"]
    assert "could not be refitted (status -9); retrying in 0.01 s" in caplog.text


def history_refit(count: int) -> Refit:
    predictor = ContentPredictor("h", {"history": HistoryMember(Options())}, Options())
    queries = [Query("demo", "", n, 99, FEATURES) for n in range(count)]
    predictor.learn([Example(query, 1 + query.prompt_tokens % 9) for query in queries])
    refit = predictor.refit(3)
    assert refit is not None
    return refit


def test_refit_and_result_round_trip_through_files(tmp_path: Path) -> None:
    refit = history_refit(150)
    write_task(tmp_path, refit)
    back = read_task(tmp_path)
    assert (back.fits, back.seed, len(back.examples)) == (refit.fits, 3, 150)
    assert [e.output_tokens for e in back.examples] == [e.output_tokens for e in refit.examples]
    result = refit.run()
    write_result(tmp_path, result)
    read = read_result(tmp_path)
    assert (set(read.models), read.examples) == ({"history"}, 150)
    np.testing.assert_array_equal(read.mixture.weights("demo"), result.mixture.weights("demo"))


def crash(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def fail(frame: Frame, lengths: Floats, seed: int, tick: ProgressCallback) -> Fitted:
    raise RuntimeError("the lengths are invalid")


@pytest.mark.slow
async def test_refit_process_reports_crash_failure_and_timeout() -> None:
    refit = history_refit(64)
    with pytest.raises(FitFailed, match="status -9: no output"):
        await run_in_process(Refit({"x": crash}, refit.examples, 0), 60)
    with pytest.raises(FitFailed, match="the lengths are invalid"):
        await run_in_process(Refit({"x": fail}, refit.examples, 0), 60)
    with pytest.raises(FitFailed, match=r"the fit took longer than 0\.05 s"):
        await run_in_process(refit, 0.05)


# Service


@pytest.mark.slow
async def test_restart_replays_log_and_refits(tmp_path: Path) -> None:
    log = LogConfig(path=str(tmp_path / "outcomes.sqlite"))
    pairs = requests(80)
    async with predicting("ridge", log, real_encoder()) as running:
        await running.forecast(*(input_ for input_, _ in pairs))
        await running.observe(*(outcome for _, outcome in pairs))
        await until(lambda: running.value("examples") == 80, 60)
        assert running.value("outcomes_total", learnt="yes") == 80
        (before,) = await running.forecast(input_of("", "hello"))
    async with predicting("ridge", log, real_encoder(), refit_interval_s=0.1) as running:
        await until(lambda: running.value("outcomes_total", learnt="yes") == 80)
        (after,) = await running.forecast(input_of("", "hello"))
        assert (after.points, after.weights) == (before.points, before.weights)
        await until(lambda: running.value("refits_total", result="adopted") == 1, 60)
        short, long = await running.forecast(YES, ESSAY)
        assert (short.source, long.source) == ("words", "words")
        assert mean(short) * 2 < mean(long)
        await running.observe(ended("a", 4), ended("b", 400))
        again = [
            input_of("c", "Say yes or no: is 78 an even number?"),
            input_of("d", "Write a long essay about the history of the number 78."),
        ]
        short, long = await running.improved(*again)
        assert (short.source, long.source) == ("ridge", "ridge")
        assert mean(short) * 3 < mean(long)
        await until(lambda: running.value("model_version") == 1)
        assert running.value("model_age_seconds") > 0


async def test_long_log_is_replayed_completely(tmp_path: Path) -> None:
    log = LogConfig(path=str(tmp_path / "outcomes.sqlite"))
    kept = SqliteLog.open(log.path, 10_000)
    waiting = PendingForecast(MADE, pack(FEATURES))
    count = 2_000
    await kept.append([encode(OUTCOME, waiting, DEFAULT_NAME, "other", 0)] * count)
    await kept.close()
    async with predicting("ridge", log) as running:
        await until(lambda: running.value("examples") == count)
        assert running.value("outcomes_total", learnt="yes") == count


async def test_replicas_on_one_log_learn_the_same(tmp_path: Path) -> None:
    log = LogConfig(path=str(tmp_path / "outcomes.sqlite"))
    async with predicting(log=log) as one, predicting(log=log) as other:
        await one.observe(*(ended("", n) for n in (5, 6, 7)))
        await other.observe(*(ended("", n) for n in (8, 8)))
        await until(lambda: one.value("outcomes_total", learnt="yes") == 5)
        await until(lambda: other.value("outcomes_total", learnt="yes") == 5)
        first, second = [await r.forecast(input_of("", "hello")) for r in (one, other)]
        assert first == second and list(first[0].points) == [5, 6, 7, 8, UNCAPPED]


async def test_unselected_prompt_teaches_only_its_length(tmp_path: Path) -> None:
    log = LogConfig(path=str(tmp_path / "outcomes.sqlite"))
    kept = SqliteLog.open(log.path, 100)
    rows = [
        encode(outcome, PendingForecast(MADE, pack(FEATURES)), DEFAULT_NAME, "other", 0)
        for outcome in (OUTCOME, Outcome("s", "demo", "", 12, 31, 99, FinishReason.STOP, 1.0, 0))
    ]
    late = Outcome("t", "demo", "", 12, 300, 999, FinishReason.STOP, 1.0, 0)
    rows.append(encode(late, PendingForecast(MADE, pack(FEATURES)), DEFAULT_NAME, "other", 0))
    await kept.append(rows)
    await kept.close()
    async with (
        predicting("ridge", log, learn_rule="all") as all_,
        predicting("ridge", log, learn_rule="mispredicted") as some,
        predicting("forest", log) as forest,
    ):
        for running in (all_, some, forest):
            await until(lambda: running.value("examples") > 0)  # noqa: B023 - awaited in its turn
            assert running.value("outcomes_total", learnt="yes") == 3
        assert [r.value("examples") for r in (all_, some, forest)] == [3, 1, 1]


async def test_text_is_logged_only_when_enabled(tmp_path: Path) -> None:
    for keep in (False, True):
        log = LogConfig(path=str(tmp_path / f"{keep}.sqlite"), keep_text=keep)
        async with predicting(log=log) as running:
            await running.forecast(input_of("a", "a secret"))
            await running.observe(ended("a", 5))
        kept = SqliteLog.open(log.path, 10)
        (entry,) = await kept.read("", 10)
        await kept.close()
        assert (b"a secret" in entry.row.payload) is keep


async def test_outcome_is_scored_by_its_own_forecast() -> None:
    async with predicting() as running:
        await running.observe(*(ended("", n) for n in (10, 20, 30, 40)))
        await running.forecast(input_of("a", "x"), input_of("b", "y"), input_of("c", "z"))
        await running.observe(
            ended("a", 20), ended("b", 500), ended("c", 25, reason=0), ended("unknown", 7)
        )
        await until(lambda: running.value("scored") == 2)
        assert running.value("coverage", interval="90") == 1  # 500 is less than max_tokens of 1,000
        assert running.value("pending") == 0
