"""The tokens of an answer, from events of servers with and without token ids."""

import json

import pytest

from foretoken.running.options import demo_model
from services.core import FinishReason
from services.worker.backend.answer import DONE, BackendAnswer
from services.worker.backend.dialect import Dialect
from services.worker.backend.requests import Arrival
from services.worker.folder import load_tokenizer

DEMO = load_tokenizer(demo_model())
EOS = 1
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
GREEN, BLUE = (DEMO.encode(text).ids for text in (" green", " blue"))


def read(dialect: Dialect, *choices: dict) -> tuple[list[Arrival], bool]:
    answer = BackendAnswer(dialect, DEMO, EOS)
    events = [json.dumps({"choices": [choice]}).encode() for choice in choices]
    return [arrival for event in (*events, DONE) for arrival in answer.read(event)], answer.ended


IDS, TEXT = Dialect(True, True), Dialect(True, False)


@pytest.mark.parametrize(
    ("dialect", "choices", "arrivals"),
    [
        (
            IDS,
            [{"token_ids": [5]}, {"token_ids": [6, EOS], "finish_reason": "stop"}],
            [Arrival(5), Arrival(6), Arrival(EOS, None, STOP)],
        ),
        (  # the end token is left out
            IDS,
            [{"token_ids": [5]}, {"token_ids": [], "finish_reason": "stop"}],
            [Arrival(5), Arrival(EOS, None, STOP)],
        ),
        (IDS, [{"token_ids": [5], "finish_reason": "length"}], [Arrival(5, None, LENGTH)]),
        (
            TEXT,
            [{"text": " green"}, {"text": " blue", "finish_reason": "stop"}],
            [*map(Arrival, GREEN + BLUE), Arrival(EOS, None, STOP)],
        ),
        (
            TEXT,
            [{"text": " green"}, {"text": " blue", "finish_reason": "length"}],
            [*map(Arrival, GREEN + BLUE[:-1]), Arrival(BLUE[-1], None, LENGTH)],
        ),
        (TEXT, [{"text": "", "finish_reason": "stop"}], [Arrival(EOS, None, STOP)]),
    ],
)
def test_last_token_ends_the_answer(
    dialect: Dialect, choices: list[dict], arrivals: list[Arrival]
) -> None:
    assert read(dialect, *choices) == (arrivals, True)


def test_events_after_the_end_have_no_effect() -> None:
    ended = {"token_ids": [5], "finish_reason": "stop"}
    assert read(IDS, ended, {"token_ids": [6]}) == ([Arrival(5, None, STOP)], True)


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"token_ids": [], "finish_reason": "abort"}, "cut the answer off"),
        ({"text": "words"}, "no longer returns token ids"),
    ],
)
def test_what_no_answer_has_is_one_sentence(choice: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(IDS, choice)


def test_tokens_before_an_event_that_cannot_be_read_are_kept() -> None:
    answer = BackendAnswer(IDS, DEMO, EOS)
    token, error = b'{"choices": [{"token_ids": [5]}]}', b'{"error": "out of memory"}'
    assert answer.read_all([token, error, token]) == ([Arrival(5)], "out of memory")
    assert answer.read_all([token]) == ([Arrival(5)], "")
