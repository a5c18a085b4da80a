"""Unusual input and failing parts: requests are still forecast, and failures are counted."""

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from protos.generated import predictor_pb2
from services.forecast import UNCAPPED
from services.predictor.blend.content import ContentPredictor
from services.predictor.interface import LAYERS, Options, Query
from services.predictor.learning.log_warning import REPLACED, UNAVAILABLE, UNREADABLE
from services.predictor.predictors import PREDICTORS
from services.runtime.outcomelog import Entry, LogUnavailable, Row
from services.runtime.outcomelog.config import LogConfig
from services.runtime.outcomelog.memory import MemoryLog
from services.runtime.outcomelog.sqlite import SqliteLog
from tests.observability.lines import lines_of
from tests.predictor.predictor_serving import (
    HashEncoder,
    Running,
    ended,
    input_of,
    predicting,
    real_encoder,
)
from tests.reach import until

PROMPTS = {
    "empty": "",
    "blank": " \n\t ",
    "1 MB": "why? " * 200_000,
    "1 MB in one word": "x" * 10**6,
    "not English": "写一篇关于海的文章。 Напиши о море. اكتب عن البحر 🌊",
    "binary": bytes(range(256)).decode("latin-1") * 20,
    "controls": "\x00\x01\ufffe\U0010ffff\u202e" * 50,
}


async def forecast_and_learn(running: Running, name: str, prompt: str) -> None:
    before = running.value("outcomes_total", learnt="yes")
    (forecast,) = await running.forecast(input_of(name, prompt, prompt))
    assert forecast.points and min(forecast.points) > 0
    await running.observe(ended(name, 7))
    assert running.value("outcomes_total", learnt="yes") == before + 1


async def test_any_prompt_is_forecast_and_learned() -> None:
    async with predicting("retrieval", encoder=real_encoder(), way="socket") as running:
        for name, prompt in PROMPTS.items():
            await forecast_and_learn(running, name, prompt)
        assert running.value("fallbacks_total", reason="failed") == 0
        assert running.value("fallbacks_total", reason="broken") == 0
        await until(lambda: running.value("examples") == len(PROMPTS))


async def test_long_texts_are_truncated_as_in_gateway() -> None:
    lengths: list[int] = []

    class Measuring(HashEncoder):
        def encode(self, texts: Sequence[str]) -> np.ndarray:
            lengths.extend(len(text.encode()) for text in texts)
            return super().encode(texts)

    async with predicting("ridge", encoder=Measuring(), max_text_bytes=1_000) as running:
        await forecast_and_learn(running, "a", "é" * 10**6)
    assert max(lengths) == 1_000


class Broken(HashEncoder):
    """An encoder that returns NaN or raises."""

    raises = False

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        if self.raises:
            raise RuntimeError("the encoder failed")
        return np.full((len(texts), LAYERS, self.dim), np.nan, np.float32)


@pytest.mark.parametrize(("raises", "reason"), [(False, "broken"), (True, "failed")])
async def test_failing_encoder_falls_back_to_history(
    raises: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = Broken()
    async with predicting("retrieval", encoder=encoder) as running:
        encoder.raises = raises
        for number in range(3):
            await forecast_and_learn(running, f"r{number}", f"prompt {number}")
        (forecast,) = await running.forecast(input_of("a", "one more"))
        assert (forecast.source, list(forecast.points)) == ("history", [7, UNCAPPED])
        await until(lambda: running.value("fallbacks_total", reason=reason) == 4)
    message = [
        r.getMessage()
        for r in caplog.records
        if r.name == "services.predictor.serving.prompt_reader"
    ]
    assert len(message) == 1 and "history is used (logged once per reason)" in message[0]


async def test_slow_encoder_does_not_delay_forecasts() -> None:
    class Slow(HashEncoder):
        def encode(self, texts: Sequence[str]) -> np.ndarray:
            released.wait(10)
            return super().encode(texts)

    released = threading.Event()
    released.set()
    async with predicting(
        "retrieval",
        encoder=Slow(),
    ) as running:
        released.clear()
        try:
            await forecast_and_learn(running, "a", "hello")
            assert running.value("examples") == 0
        finally:
            released.set()
        await until(lambda: running.value("examples") == 1)


async def test_failing_model_falls_back_to_history(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(ContentPredictor):
        def forecast(self, batch: Sequence[Query]) -> list:
            if any(query.features for query in batch):
                raise ZeroDivisionError("a bug")
            return super().forecast(batch)

    monkeypatch.setitem(PREDICTORS, "fails", lambda _: Fails("fails", {}, Options()))
    async with predicting("fails") as running:
        for number in range(2):
            await running.forecast(input_of(f"r{number}", "hello"))
            await running.read(number + 1)
            await running.observe(ended(f"r{number}", 7))
        assert running.value("fallbacks_total", reason="model") == 2
        await until(lambda: running.value("examples") == 2)
    assert sum("(model: a bug)" in r.getMessage() for r in caplog.records) == 1


async def test_failing_word_model_falls_back_to_history(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(ContentPredictor):
        def by_words(self, batch: Sequence[Query]) -> list:
            if any(query.prompt for query in batch):
                raise ZeroDivisionError("a bug")
            return super().by_words(batch)

    monkeypatch.setitem(PREDICTORS, "fails", lambda _: Fails("fails", {}, Options()))
    async with predicting("fails") as running:
        with lines_of("services.predictor.service") as lines:
            one = input_of("traced", "hello")
            one.traceparent = f"00-{'ab' * 16}-{'cd' * 8}-01"
            await running.forecast(one)
            [line] = lines()
        assert (line["request_id"], line["trace_id"]) == ("traced", "ab" * 16)
        await forecast_and_learn(running, "r1", "hello")
        assert running.value("fallbacks_total", reason="model") == 2
    assert sum("the prompt model failed" in r.getMessage() for r in caplog.records) == 1


async def test_corrupt_log_is_set_aside_with_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "outcomes.sqlite"
    path.write_bytes(os.urandom(10_000))
    async with predicting(log=LogConfig(path=str(path))) as running:
        await forecast_and_learn(running, "a", "hello")
    assert (tmp_path / "outcomes.sqlite.corrupt-1").exists()
    assert "is unusable" in caplog.text and "started a new one" in caplog.text
    async with predicting(log=LogConfig(path=str(path))) as running:
        await until(lambda: running.value("outcomes_total", learnt="yes") == 1)


async def test_newer_and_invalid_log_rows_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = LogConfig(path=str(tmp_path / "outcomes.sqlite"))
    kept = SqliteLog.open(log.path, 100)
    await kept.append(
        [Row("outcome", 2, b"?"), Row("outcome", 1, b"\xff\xff"), Row("outcome", 1, b"\xff"),
         Row("timing", 1, b"of another service")]
    )  # fmt: skip
    await kept.close()
    async with predicting(log=log) as running:
        await forecast_and_learn(running, "a", "hello")
        await until(lambda: running.value("log_from_future_total") == 1)
        assert running.value("log_unreadable_total") == 2
    message = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(message) == 2
    assert any("written by a newer foretoken" in line for line in message)
    assert any("unreadable rows" in line for line in message)


def test_unusable_log_prevents_start_with_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (f"{tmp_path}/file/outcomes.sqlite", "kafka://somewhere"):
        with pytest.raises(ValueError, match="outcome log"):
            LogConfig(path=path).open()


class UnavailableLog(MemoryLog):
    """A log that can become unavailable."""

    gone = False

    async def append(self, rows: Sequence[Row], again: bool = False) -> None:
        self._require()
        await super().append(rows)

    async def read(self, after: str, limit: int) -> list[Entry]:
        self._require()
        return await super().read(after, limit)

    def _require(self) -> None:
        if self.gone:
            raise LogUnavailable("the log is unavailable")


async def test_log_outage_loses_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    log = UnavailableLog(100)
    monkeypatch.setattr(LogConfig, "open", lambda _: log)
    async with predicting() as running:
        await forecast_and_learn(running, "a", "hello")
        log.gone = True
        await until(lambda: running.value("log_unavailable") == 1)
        async with asyncio.timeout(2):
            (forecast,) = await running.forecast(input_of("b", "hello"))
            await running.observe(ended("b", 9))
        assert list(forecast.points) == [7, UNCAPPED]
        log.gone = False
        await until(lambda: running.value("outcomes_total", learnt="yes") == 2)
        (forecast,) = await running.forecast(input_of("c", "hello"))
        assert list(forecast.points) == [7, 9, UNCAPPED]
        await until(lambda: running.value("log_unavailable") == 0)


async def test_listeners_receive_a_warning_when_the_log_fails_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = UnavailableLog(100)
    monkeypatch.setattr(LogConfig, "open", lambda _: log)
    monkeypatch.setattr("services.predictor.service.METRICS_INTERVAL_S", 0.01)
    async with predicting() as running:
        stream = aiter(running.stub.Improve(predictor_pb2.ImproveRequest()))
        log.gone = True
        assert (await anext(stream)).warning == UNAVAILABLE
        late = running.stub.Improve(predictor_pb2.ImproveRequest())
        assert (await anext(aiter(late))).warning == UNAVAILABLE
        log.gone = False
        last = await anext(stream)
        assert last.HasField("warning") and last.warning == ""


def spoil(log: LogConfig) -> None:
    Path(log.path).write_bytes(os.urandom(10_000))


async def test_random_bytes_in_place_of_the_log_and_in_its_rows_give_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.predictor.service.METRICS_INTERVAL_S", 0.01)
    log = LogConfig(path=str(tmp_path / "outcomes.sqlite"))
    spoil(log)
    kept = SqliteLog.open(log.path, 100)
    await kept.append([Row("outcome", 1, b"\xff\xff")])
    await kept.close()
    warnings = []
    for _ in range(2):
        async with predicting(log=log) as running:
            stream = running.stub.Improve(predictor_pb2.ImproveRequest())
            warnings.append((await anext(aiter(stream))).warning)
            stream.cancel()
        spoil(log)
    assert warnings == [UNREADABLE, REPLACED]
