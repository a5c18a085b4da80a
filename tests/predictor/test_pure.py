"""The pure mode over the API: the named model answers first and alone."""

import pytest

from tests.predictor.predictor_serving import (
    MEAN_LENGTHS,
    Running,
    ended,
    input_of,
    mean,
    predicting,
)
from tests.reach import until

SHORT, LONG = MEAN_LENGTHS
ASKED = input_of("a", SHORT.format("many")), input_of("b", LONG.format("many"))


async def learn(running: Running) -> None:
    for number in range(80):
        kind = LONG if number % 2 else SHORT
        await running.forecast(input_of(f"r{number}", kind.format(number)))
        await running.observe(ended(f"r{number}", MEAN_LENGTHS[kind]))
    await until(lambda: running.value("refits_total", result="adopted") > 0, 60)


async def test_pure_predictor_forecasts_max_tokens_before_its_first_fit() -> None:
    async with predicting("ridge", pure=True) as running:
        for number in range(3):
            [cold] = await running.forecast(input_of(f"r{number}", "hello"))
            assert (cold.source, list(cold.points)) == ("max", [1_000])
            await running.observe(ended(f"r{number}", 7))
        assert running.value("answered_total", stage="plain") == 3
        assert running.value("unread") == running.value("improved_total") == 0
        await until(lambda: running.value("examples") == 3)


@pytest.mark.slow
async def test_pure_predictor_words_answers_alone() -> None:
    async with predicting("words", pure=True, refit_interval_s=0.2) as running:
        await learn(running)
        short, long = await running.forecast(*ASKED)
        assert (short.source, long.source) == ("words", "words")
        assert mean(short) < 40 < 200 < mean(long)
        [empty] = await running.forecast(input_of("c", ""))
        assert empty.source == "words"


@pytest.mark.slow
async def test_pure_predictor_reads_prompts_before_it_answers() -> None:
    async with predicting("ridge", pure=True, refit_interval_s=0.2) as running:
        await learn(running)
        short, long = await running.forecast(*ASKED)
        assert (short.source, long.source) == ("ridge", "ridge")
        assert mean(short) * 3 < mean(long)
        assert running.value("answered_total", stage="read") >= 2
        assert running.value("read_total", of="waiting") == 0
