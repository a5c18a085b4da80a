"""Background reading: CPU budget, threads and listeners."""

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.generated import predictor_pb2
from services.encoder.encoder import Encoder
from services.forecast import certain
from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.members import FittedMember
from services.predictor.encoder.extract import Extractor
from services.predictor.interface import Example, Features, Options, Prompt, Query
from services.predictor.models.fitting import Fit
from services.predictor.models.ridge import fit_ridge, fit_words
from services.predictor.predictors import PREDICTORS
from services.predictor.serving.broadcast import Broadcast
from services.predictor.serving.cpu_budget import CpuBudget
from services.predictor.serving.executor import CpuBudgetedExecutor
from services.predictor.serving.forecaster import ForecastQuery
from services.predictor.serving.prompt_reader import BATCH, PromptBatchReader
from tests.predictor.encoder.small_encoders import bert, saved
from tests.predictor.predictor_serving import HashEncoder, ended, input_of, mean, predicting
from tests.predictor.serving_fixtures import FEATURES, PACKED
from tests.reach import until

# CPU budget


def test_cpu_budget_matches_worked_example() -> None:
    budget = CpuBudget(share=0.1, saved_s=1.0, now_s=100.0)
    assert budget.wait_s(100.0) == 0
    budget.spend(0.75, 101.0)  # 1 + 0.1 - 0.75
    assert budget.wait_s(101.0) == 0
    budget.spend(0.6, 102.0)  # 0.35 + 0.1 - 0.6
    assert budget.wait_s(102.0) == pytest.approx(1.5)
    assert budget.wait_s(103.0) == pytest.approx(0.5)
    assert budget.wait_s(104.0) == 0
    assert budget.spent_s == pytest.approx(1.35)


def test_cpu_budget_is_capped() -> None:
    budget = CpuBudget(share=0.5, saved_s=0.2, now_s=0.0)
    budget.spend(0.0, 1_000.0)
    budget.spend(0.4, 1_000.0)
    assert budget.wait_s(1_000.0) == pytest.approx(0.4)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1)), max_size=50))
def test_cpu_budget_with_full_share_never_waits(work: list[tuple[float, float]]) -> None:
    budget, now_s = CpuBudget(share=1.0, saved_s=0.01, now_s=0.0), 0.0
    for took_s, share in work:
        now_s += took_s
        budget.spend(took_s * share, now_s)
        assert budget.wait_s(now_s) == pytest.approx(0, abs=1e-9)


@given(st.floats(0.01, 1), st.lists(st.floats(0, 2), min_size=1, max_size=50))
def test_cpu_budget_bounds_spending(share: float, costs: list[float]) -> None:
    """Work runs as soon as it may, on a full core."""
    budget, now_s = CpuBudget(share, saved_s=1.0, now_s=0.0), 0.0
    for cost in costs:
        now_s += budget.wait_s(now_s) + cost
        budget.spend(cost, now_s)
    now_s += budget.wait_s(now_s)
    assert budget.spent_s <= 1.0 + share * now_s + 1e-6


# Executor


class FailingExtractor:
    """Extracts all prompts except those marked as bad."""

    def extract(self, texts: Sequence[Prompt]) -> list[Features]:
        if any("bad" in prompt.user_input for prompt in texts):
            raise ValueError("the prompt is bad")
        return [FEATURES for _ in texts]


def test_prompt_reader_isolates_a_failing_prompt(caplog: pytest.LogCaptureFixture) -> None:
    batch_reader = PromptBatchReader(
        FailingExtractor(), lambda queries: [certain(9, "model") for _ in queries]
    )
    batch = [
        ForecastQuery(text, Query("demo", "", 1, 9, prompt=Prompt("", text, 1)), 0.0)
        for text in ("good", "bad", "fine", "bad too")
    ]
    readings = batch_reader.read(batch)
    assert [r.failed_step for r in readings] == ["", "failed", "", "failed"]
    assert [r.packed for r in readings] == [PACKED, b"", PACKED, b""]
    assert [bool(r.by_model) for r in readings] == [True, False, True, False]
    assert sum("logged once" in r.getMessage() for r in caplog.records) == 1


async def test_executor_runs_turns_serially_in_thread_and_charges_them() -> None:
    executor = CpuBudgetedExecutor(share=1.0, saved_s=1.0)
    seen: list[str] = []

    def work(name: str) -> str:
        seen.append(name)
        return threading.current_thread().name

    threads = await asyncio.gather(*(executor.run(partial(work, n)) for n in "abc"))
    with pytest.raises(ZeroDivisionError):
        await executor.run(lambda: 1 // 0)
    assert await executor.run(lambda: 5) == 5
    executor.close()
    assert seen == ["a", "b", "c"]
    assert {name.rpartition("_")[0] for name in threads} == {"foretoken-read"}
    assert executor.budget.spent_s > 0
    assert not [t for t in threading.enumerate() if t.name.startswith("foretoken-read")]


# Listeners


async def test_broadcast_drops_oldest_for_slow_listener() -> None:
    feed: Broadcast[int] = Broadcast(2)
    feed.push(0)
    one, other = feed.listen(), feed.listen()
    first = [asyncio.ensure_future(anext(listener)) for listener in (one, other)]
    await asyncio.sleep(0)
    assert len(feed) == 2
    feed.push(1)
    assert await asyncio.gather(*first) == [1, 1]
    for number in (2, 3, 4):
        feed.push(number)
    assert [await anext(one), await anext(one)] == [3, 4]
    assert feed.dropped == 2
    await one.aclose()
    assert len(feed) == 1


# Service


def fitted(encoder: Encoder, words: Fit | None) -> ContentPredictor:
    """Has learned that poems are long and sums short."""
    predictor = ContentPredictor("ridge", {"ridge": FittedMember(fit_ridge)}, Options(), words)
    prompts = [Prompt("", f"{what} the sea {n}", 5) for n in range(40) for what in ABOUT]
    predictor.learn(
        [
            Example(Query("demo", "", 5, 1_000, features), ABOUT[prompt.user_input.split()[0]])
            for prompt, features in zip(prompts, Extractor(encoder).extract(prompts), strict=True)
        ]
    )
    predictor.fit()
    return predictor


ABOUT = {"write": 400, "sum": 4}


@pytest.mark.parametrize(("words", "source"), [(None, "history"), (fit_words, "words")])
async def test_improved_forecast_is_streamed(
    words: Fit | None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = Encoder.load(str(saved(tmp_path, bert())))
    monkeypatch.setitem(PREDICTORS, "ridge", lambda _: fitted(encoder, words))
    async with predicting("ridge", encoder=encoder, way="socket") as running:
        (at_once,) = await running.forecast(input_of("", "write the list"))
        assert at_once.source == source
        long, short = await running.improved(
            input_of("a", "write a poem"), input_of("b", "sum the sea")
        )
        assert (long.source, short.source, long.shared_key) == ("ridge", "ridge", "")
        assert mean(short) < mean(long)
        (known,) = await running.forecast(input_of("c", "write a poem"))
        assert known == long
        assert running.value("answered_total", stage="remembered") == 1
        assert running.value("reading_lag_seconds_count") == running.value("improved_total") == 2


class BlockedEncoder(HashEncoder):
    """Encodes only when released."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Event()
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.began.set()
        assert self.go.wait(20)
        self.texts += texts
        return super().encode(texts)


async def test_busy_encoder_does_not_delay_answers_and_newest_is_read_first() -> None:
    encoder = BlockedEncoder()
    async with predicting("retrieval", encoder=encoder, unread_max=BATCH) as running:
        encoder.texts.clear()
        encoder.go.clear()
        encoder.began.clear()
        try:
            await running.forecast(input_of("first", "first"))
            await asyncio.to_thread(encoder.began.wait, 20)
            for number in range(BATCH + 2):
                (forecast,) = await running.forecast(input_of(f"r{number}", f"prompt {number}"))
                assert forecast.source == "history"
            await running.observe(ended("r9", 7, reason=4))
        finally:
            encoder.go.set()
        await running.read(BATCH)
        await until(lambda: running.value("unread_dropped_total") == 2)
    read = [text for text in encoder.texts if text.startswith("prompt")]
    assert read == [f"prompt {n}" for n in range(8, 1, -1)]


@pytest.mark.parametrize("model", ["history", "max"])
async def test_predictor_without_reading_sends_no_improvements(model: str) -> None:
    async with predicting(model) as running:
        stream = running.stub.Improve(predictor_pb2.ImproveRequest())
        listening = asyncio.ensure_future(anext(aiter(stream)))
        await until(lambda: running.service.listeners == 1)
        await running.forecast(input_of("a", "hello"))
        await running.observe(ended("a", 5))
        assert not listening.done()
        assert running.value("read_total", of="waiting") == 0
        assert running.value("answered_total", stage="plain") == 1
        listening.cancel()
        stream.cancel()
