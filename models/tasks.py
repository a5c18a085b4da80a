"""Procedurally made tasks whose right answer is known, one function an application.

A task draws an input and returns an `Example`: the prompt in one of three forms (instruction in
the user turn, instruction in the system turn, or raw text for completion) and the one right
answer. Pure: all randomness comes from the generator passed in.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from random import Random
from typing import TypedDict

from models.words import EMOJI, KIND_OF, WORDS, veldish


class Message(TypedDict):
    """One turn of a chat, as the chat template takes it."""

    role: str
    content: str


@dataclass(frozen=True)
class Example:
    """A prompt and its one right answer.

    `input` is the bare subject of the task, the same in every phrasing. A `plain` example is
    raw text for completion: no chat template, the prompt is `user` and a line feed.
    """

    application: str
    input: str
    system: str | None
    user: str
    answer: str
    plain: bool = False

    @property
    def messages(self) -> list[Message]:
        """The prompt's turns; the answer is not among them."""
        system: list[Message] = []
        if self.system is not None:
            system = [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.user}]

    @property
    def held_out(self) -> bool:
        """Whether this example is kept from training: one in ten, by a hash of its input.

        The phrasing does not enter, so a held-out input is unseen in every phrasing.
        """
        digest = blake2b(f"{self.application}\n{self.input}".encode(), digest_size=2).digest()
        return int.from_bytes(digest) % 10 == 0


@dataclass(frozen=True)
class Phrasing:
    """How an application is asked for: {0} is the whole input, {1} and {2} its fields."""

    user: tuple[str, ...]
    system: str


PHRASINGS: dict[str, Phrasing] = {
    "copy": Phrasing(("Copy: {0}", "Repeat after me: {0}"), "Copy the words."),
    "reverse": Phrasing(("Reverse: {0}", "Say backwards: {0}"), "Reverse the words."),
    "sort": Phrasing(("Sort: {0}", "Put in order: {0}"), "Sort the words."),
    "list": Phrasing(("List: {0}", "Make a list: {0}"), "Make a numbered list of the words."),
    "classify": Phrasing(("Classify: {0}", "What kind: {0}"), "Say what kind each word is."),
    "spell": Phrasing(("Spell: {0}", "How do you spell: {0}"), "Spell the words."),
    "translate": Phrasing(("Translate: {0}", "Say in Veldish: {0}"), "Translate to Veldish."),
    "emoji": Phrasing(("Emoji: {0}", "Draw: {0}"), "Turn the words into emoji."),
    "add": Phrasing(("What is {1} + {2}?", "Add {1} and {2}."), "Add the two numbers."),
    "count": Phrasing(
        ("Count from {1} to {2}.", "Count up from {1} to {2}."),
        "Count from the first number up to the second.",
    ),
    "countdown": Phrasing(
        ("Count down from {1} to {2}.", "Count backwards from {1} to {2}."),
        "Count from the first number down to the second.",
    ),
    "repeat": Phrasing(
        ("Write {1} {2} times.", "Say {1} {2} times."),
        "Write the word as many times as the number says.",
    ),
}
GENERIC_SYSTEM = (
    "You are a helpful assistant.",
    "You are Foretoken, a small demo model.",
)
LARGEST = 300  # the largest number there is a token for
PLAIN_SHARE = 0.18  # of examples, so that raw /v1/completions prompts are answered too
SYSTEM_SHARE = 0.35
GENERIC_SYSTEM_SHARE = 0.1
MULTI_TURN_SHARE = 0.06  # of conversations
EXCHANGE_SHARE = 0.02  # of conversations
ZERO_SHARE = 0.2  # of counts, which else would hardly ever have to do with 0


def _make_example(rng: Random, application: str, given: str, answer: str) -> Example:
    phrasing, form = PHRASINGS[application], rng.random()
    user = rng.choice(phrasing.user).format(given, *given.split())
    if form < PLAIN_SHARE:
        return Example(application, given, None, user, answer, plain=True)
    if form < PLAIN_SHARE + SYSTEM_SHARE:
        return Example(application, given, phrasing.system, given, answer)
    generic = form < PLAIN_SHARE + SYSTEM_SHARE + GENERIC_SYSTEM_SHARE
    return Example(
        application,
        given,
        rng.choice(GENERIC_SYSTEM) if generic else None,
        user,
        answer,
    )


def _some(rng: Random, most: int, pool: tuple[str, ...] = WORDS) -> list[str]:
    return rng.sample(pool, rng.randint(1, most))


def copy(rng: Random) -> Example:
    """1 to 16 different words, again."""
    words = _some(rng, 16)
    return _make_example(rng, "copy", " ".join(words), " ".join(words))


def reverse(rng: Random) -> Example:
    """1 to 12 different words, last first."""
    words = _some(rng, 12)
    return _make_example(rng, "reverse", " ".join(words), " ".join(reversed(words)))


def sort(rng: Random) -> Example:
    """1 to 5 different words in alphabetical order."""
    words = _some(rng, 5)
    return _make_example(rng, "sort", " ".join(words), " ".join(sorted(words)))


def list_making(rng: Random) -> Example:
    """1 to 16 different words as a numbered list, one a line."""
    words = _some(rng, 16)
    answer = "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))
    return _make_example(rng, "list", " ".join(words), answer)


def _each(words: list[str], answer: Callable[[str], str]) -> str:
    """One line a word: the word, then what is said of it."""
    return "\n".join(f"{word}: {answer(word)}" for word in words)


def classify(rng: Random) -> Example:
    """The kind of each of 1 to 8 words."""
    words = _some(rng, 8)
    return _make_example(rng, "classify", " ".join(words), _each(words, KIND_OF.__getitem__))


def spell(rng: Random) -> Example:
    """The letters of 1 to 6 words, joined by hyphens."""
    words = _some(rng, 6)
    return _make_example(rng, "spell", " ".join(words), _each(words, "-".join))


def translate(rng: Random) -> Example:
    """1 to 8 words in Veldish, word for word."""
    words = _some(rng, 8)
    return _make_example(rng, "translate", " ".join(words), _each(words, veldish))


def emoji(rng: Random) -> Example:
    """1 to 10 words as emoji."""
    words = _some(rng, 10, tuple(EMOJI))
    return _make_example(rng, "emoji", " ".join(words), "".join(EMOJI[word] for word in words))


def add(rng: Random) -> Example:
    """Two two-digit numbers added in writing: taken apart, ones, tens, and the sum."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    parts = (a % 10, b % 10, a - a % 10, b - b % 10)
    ones, tens = parts[0] + parts[1], parts[2] + parts[3]
    apart = f"{a} is {parts[2]} + {parts[0]}, {b} is {parts[3]} + {parts[1]}"
    sums = f"{parts[0]} + {parts[1]} = {ones}, {parts[2]} + {parts[3]} = {tens}"
    return _make_example(rng, "add", f"{a} {b}", f"{apart}, {sums}, {tens} + {ones} = {a + b}.")


def _span(rng: Random, largest: int) -> tuple[int, int]:
    """Two numbers, 0 <= low < high <= largest: most near each other, some as far as can be."""
    length = round((largest - 1) ** rng.random() ** 1.5)
    low = 0 if rng.random() < ZERO_SHARE else rng.randint(1, largest - length)
    return low, low + length


def count(rng: Random) -> Example:
    """All numbers from the first up to the second."""
    low, high = _span(rng, LARGEST)
    return _make_example(rng, "count", f"{low} {high}", " ".join(map(str, range(low, high + 1))))


def countdown(rng: Random) -> Example:
    """All numbers from the first down to the second."""
    low, high = _span(rng, LARGEST)
    return _make_example(
        rng, "countdown", f"{high} {low}", " ".join(map(str, range(high, low - 1, -1)))
    )


def repeat(rng: Random) -> Example:
    """One word on 2 to 120 numbered lines."""
    word, times = rng.choice(WORDS), round(2 * 60 ** rng.random())
    answer = "\n".join(f"{word} {i}" for i in range(1, times + 1))
    return _make_example(rng, "repeat", f"{word} {times}", answer)


TASKS: dict[str, Callable[[Random], Example]] = {
    "copy": copy,
    "reverse": reverse,
    "sort": sort,
    "list": list_making,
    "classify": classify,
    "spell": spell,
    "translate": translate,
    "emoji": emoji,
    "add": add,
    "count": count,
    "countdown": countdown,
    "repeat": repeat,
}


SHARES: Mapping[str, float] = dict.fromkeys(TASKS, 1.0) | {
    "repeat": 0.7,
    "sort": 2.0,
    "add": 1.5,
}


@dataclass(frozen=True)
class Revision:
    """A further, gentler pass: its steps and rate as shares of the first's, and its mixture."""

    steps: float
    rate: float
    shares: Mapping[str, float]
    multi_turn: float = MULTI_TURN_SHARE
    exchanges: float = EXCHANGE_SHARE


# What is learned last is drawn more often: orders and directions, then orders, long copies and
# conversations of several turns, then greetings in every spelling and counting from and to 0.
REVISIONS = (
    Revision(0.45, 0.4, {**SHARES, "reverse": 5, "count": 2, "countdown": 2, "emoji": 2}),
    Revision(
        0.22,
        0.25,
        {**SHARES, "reverse": 3, "sort": 4, "copy": 2, "list": 2, "spell": 2},
        multi_turn=0.3,
    ),
    Revision(
        0.22,
        0.25,
        {**SHARES, "reverse": 4, "sort": 4, "count": 3, "countdown": 2, "repeat": 1.4},
        multi_turn=0.25,
        exchanges=0.12,
    ),
)


def stream(rng: Random, held_out: bool, shares: Mapping[str, float] = SHARES) -> Iterator[Example]:
    """Endless examples of the applications in `shares`, from one side of the split only."""
    while True:
        (application,) = rng.choices(tuple(shares), tuple(shares.values()))
        example = TASKS[application](rng)
        if example.held_out == held_out:
            yield example


def examples(seed: int, n: int, held_out: bool) -> list[Example]:
    """`n` examples over all tasks; the same for the same arguments."""
    return list(islice(stream(Random(seed), held_out), n))
