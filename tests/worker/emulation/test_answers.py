"""Lengths and tokens of emulated answers."""

from itertools import count
from statistics import NormalDist, median

import numpy as np
import pytest

from services.worker.emulation.answers import Answers, LengthLaw
from services.worker.requests.types.prompt import Prompt, SamplingParams
from services.worker.requests.types.sequence import Sequence

EOS = 1
WORDS = range(100, 151)
LAW = LengthLaw(50.0, 1.2)
NUMBERS = count()


def ask(ids: tuple[int, ...], sampling: SamplingParams | None = None, output: int = 0) -> Prompt:
    """A prompt under a new name, with this many tokens of output delivered before."""
    delivered = tuple(answer_to(ids)[:output])
    sampling = sampling or SamplingParams()
    return Prompt(f"r{next(NUMBERS)}", ids + delivered, len(ids), 10_000, sampling)


def answer(answers: Answers, prompt: Prompt) -> list[int]:
    sequence = Sequence.start(prompt, 10_000)
    while sequence.tokens[-1] != EOS:
        sequence.tokens.append(answers.draw(sequence))
    return sequence.tokens[prompt.prompt_tokens :]


def answer_to(ids: tuple[int, ...]) -> list[int]:
    return answer(Answers(WORDS, EOS, LAW), Prompt(f"r{next(NUMBERS)}", ids, len(ids), 10_000))


@pytest.mark.parametrize(
    ("share", "tokens"),
    # The quantiles of the normal distribution at 0.5, 0.8413 and 0.1587 are 0, 1 and -1.
    [(0.5, 50), (NormalDist().cdf(1), 166), (NormalDist().cdf(-1), 15), (1e-9, 1)],
)
def test_length_law_by_hand(share: float, tokens: int):
    assert LAW.tokens(share) == tokens


def test_equal_prompts_have_equal_answers_and_others_do_not():
    one, other = (7, 8, 9), (7, 8, 10)
    made = answer_to(one)
    assert made == answer_to(one) != answer_to(other)
    assert made[-1] == EOS and set(made[:-1]) <= set(WORDS)
    seeded = ask(one, SamplingParams(seed=5, temperature=0.3))
    assert answer(Answers(WORDS, EOS, LAW), seeded) == made


def test_moved_request_continues_its_answer():
    ids = next((n, 8) for n in range(2, 99) if len(answer_to((n, 8))) > 10)
    moved = ask(ids, output=6)
    assert answer(Answers(WORDS, EOS, LAW), moved) == answer_to(ids)


def test_drawn_lengths_follow_the_law():
    """A thousand prompts: the median and the spread lie within four standard errors."""
    answers = Answers(WORDS, EOS, LAW)
    lengths = [answers.answer(ask((n, n + 1))).tokens for n in range(2, 1_002)]
    assert median(lengths) == pytest.approx(50, rel=4 * 1.2 * (np.pi / 2 / 1_000) ** 0.5)
    assert np.log(lengths).std() == pytest.approx(1.2, rel=4 * (1 / 2_000) ** 0.5)


def test_known_lengths_are_preferred_in_the_order_of_the_texts():
    known = {"last message": 3, "whole": 5}
    texts = {2: ["last message", "whole"], 3: ["other", "whole"], 4: ["other", "another"]}
    answers = Answers(WORDS, EOS, LAW, known, lambda ids: texts[ids[0]])
    drawn = Answers(WORDS, EOS, LAW)
    assert [len(answer(answers, ask((first,)))) for first in (2, 3)] == [3, 5]
    assert answers.answer(ask((4,))) == drawn.answer(ask((4,)))


def test_table_of_one_word():
    assert set(answer(Answers([9], EOS, LengthLaw(4, 0)), ask((5,)))) == {9, EOS}
