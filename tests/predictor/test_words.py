"""The words predictor: words and sizes only, without an encoder."""

import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import kendalltau

from services.predictor.encoder.extract import NoEncoder, word_features
from services.predictor.encoder.words import count, largest_number
from services.predictor.interface import LAYERS, Example, Prompt, Query
from services.predictor.models.fitting import ignore_progress
from services.predictor.models.frame import Frame, prompts
from services.predictor.models.ridge import fit_words
from tests.predictor.predictor_serving import MEAN_LENGTHS, ended, input_of, mean, predicting
from tests.reach import until


@pytest.mark.parametrize(
    ("text", "largest", "words"),
    [
        ("", 0, 0),
        ("Write star 90 times.", 90, 4),
        ("From 7 to 12, in 200 words!", 200, 7),
        ("call 1234567", 0, 2),  # seven digits are ignored
        ("x7y 8", 8, 2),
    ],
)
def test_largest_number_and_words_of_a_prompt_are_counted(
    text: str, largest: int, words: int
) -> None:
    assert largest_number("", text) == largest
    assert count(text) == words


def test_equal_words_are_one_prompt_without_embeddings() -> None:
    texts = ["go far", "stay", "go far", "far go"]
    queries = [Query("m", "", 3, 9, word_features(Prompt("", text, 3))) for text in texts]
    first, second, third, fourth = prompts(Frame.from_queries(queries)).tolist()
    assert first == third
    assert len({first, second, fourth}) == 3


def test_no_encoder_gives_zero_embeddings() -> None:
    assert NoEncoder().encode(["a", "b"]).shape == (2, LAYERS, 1)
    assert not NoEncoder().encode(["a"]).any()


def times(number: int) -> Prompt:
    return Prompt("", f"Say it {number} times.", 5)


def test_unseen_number_is_forecast_by_size() -> None:
    rng = np.random.default_rng(0)
    numbers = 2 * rng.integers(0, 100, 400) + 1
    examples = [
        Example(Query("m", "", 5, 1_000, word_features(times(int(n)))), int(3 * n)) for n in numbers
    ]
    frame = Frame.from_queries([example.query for example in examples])
    lengths = np.array([float(example.output_tokens) for example in examples])
    model = fit_words(frame, lengths, 0, ignore_progress).model
    unseen = range(10, 190, 20)  # odd numbers were seen
    asked_for = [Query("m", "", 5, 1_000, word_features(times(n))) for n in unseen]
    reported = model.spread(Frame.from_queries(asked_for))
    assert kendalltau(reported.mean(axis=1), unseen).statistic > 0.8


@pytest.mark.slow
async def test_words_predictor_learns_online_and_answers_at_once() -> None:
    """After some outcomes, new short and long prompts are distinguished by their words."""
    (short, long) = MEAN_LENGTHS
    async with predicting(model="words", refit_interval_s=0.2) as running:
        for number in range(80):
            kind = long if number % 2 else short
            await running.forecast(input_of(f"r{number}", kind.format(number)))
            await running.observe(ended(f"r{number}", MEAN_LENGTHS[kind]))
        await until(lambda: running.value("refits_total", result="adopted") > 0, 20)
        reported = await running.forecast(
            input_of("a", short.format("many")), input_of("b", long.format("many"))
        )
        assert mean(reported[0]) < 40 < 200 < mean(reported[1])
        assert running.value("answered_total", stage="words") >= 2
        assert running.value("read_total", of="waiting") == 0


@pytest.mark.slow
def test_words_process_never_loads_encoder() -> None:
    code = (
        "import sys; from prometheus_client import CollectorRegistry;"
        "from services.predictor.config import PredictorConfig as C;"
        "from services.predictor.service import PredictorService as S;"
        "S(C(model='words'), CollectorRegistry());"
        "print([m for m in ('transformers', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
