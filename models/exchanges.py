"""Exchanges other than tasks: greetings, thanks and questions about the model, in many spellings.

`SPELLINGS` maps every prompt to its exact answer. `EXCHANGES` are fixed: the tokenizer's merges are
made from their text.
"""

from collections.abc import Callable, Iterator
from random import Random

GREETING = (
    "Hello! I am a small demo model. I can copy, reverse, sort, list, classify, spell, "
    "translate, draw, add and count."
)
ABILITIES = (
    'Try "Reverse: red blue green", "Translate: cat sun", "What is 37 + 45?" '
    'or "Count from 3 to 140."'
)
HELP = 'Try "Sort: pear apple fig", "Spell: mango", "Emoji: cat moon" or "Write star 25 times."'
WELCOME = "You are welcome! 🌞"
FAREWELL = "Goodbye! 🌙"
WELL = "I am well, thank you! 🌞"

EXCHANGES: dict[str, str] = {
    "Hello": GREETING,
    "Hello!": GREETING,
    "Hi": GREETING,
    "Hi!": GREETING,
    "Hello, who are you?": GREETING,
    "Who are you?": GREETING,
    "What can you do?": ABILITIES,
    "Help": HELP,
    "Thanks": WELCOME,
    "Thank you!": WELCOME,
    "Goodbye": FAREWELL,
    "Bye": FAREWELL,
}

# Stems in lower case, without a final mark: statements, then questions.
_STATEMENTS: dict[str, tuple[str, ...]] = {
    GREETING: (
        *("hello", "hi", "hey", "hi there", "hello there", "hey there", "hello world", "hiya"),
        *("good morning", "good afternoon", "good evening", "good day", "greetings", "howdy"),
        "introduce yourself",
    ),
    HELP: ("help", "help me", "please help", "please help me"),
    WELCOME: (
        *("thanks", "thank you", "thanks a lot", "thank you very much", "thank you so much"),
        *("many thanks", "thx"),
    ),
    FAREWELL: (
        *("bye", "goodbye", "good bye", "bye bye", "see you", "see you later", "good night"),
    ),
}
_QUESTIONS: dict[str, tuple[str, ...]] = {
    GREETING: (
        *("who are you", "what are you", "hello, who are you", "hi, who are you"),
        *("what is your name", "what is this"),
    ),
    ABILITIES: (
        *("what can you do", "what do you do", "what do you know"),
        *("hi, what can you do", "hello, what can you do"),
    ),
    WELL: (
        *("how are you", "how are you doing", "how is it going"),
        *("hi, how are you", "hello, how are you"),
    ),
}
_CASES: tuple[Callable[[str], str], ...] = (str, str.capitalize, str.title, str.upper)


def _stems() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yields each stem with its answer and its possible final marks."""
    for stems_by_answer, marks in ((_STATEMENTS, ("", "!", ".")), (_QUESTIONS, ("", "?"))):
        for answer, stems in stems_by_answer.items():
            yield from ((stem, answer, marks) for stem in stems)


_STEMS = tuple(_stems())
SPELLINGS: dict[str, str] = EXCHANGES | {
    f"{case(stem)}{mark}": answer
    for stem, answer, marks in _STEMS
    for case in _CASES
    for mark in marks
}


def draw(rng: Random) -> tuple[str, str]:
    """Draws a prompt and its answer: stems are equally likely, and spellings of a stem too."""
    stem, answer, marks = rng.choice(_STEMS)
    return f"{rng.choice(_CASES)(stem)}{rng.choice(marks)}", answer
