"""Generated tasks with known answers, one function per application.

A task draws an input and returns an `Example`: the prompt in one of three forms (instruction in the
user turn, instruction in the system turn, or raw text for completion) and its only correct answer.
All randomness comes from the generator passed in.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from random import Random

from models.chat import Message, Tool
from models.words import EMOJI, KIND_OF, WORDS, veldish


@dataclass(frozen=True)
class Example:
    """A prompt and its only correct answer.

    input: input of the task, the same in every phrasing. plain: raw text for completion, without
    chat template; the prompt is `user` and a line feed. before: turns between the system turn and
    the last one, which is the result of a tool if `role` says so. source: application with the same
    inputs, if another.
    """

    application: str
    input: str
    system: str | None
    user: str
    answer: str
    plain: bool = False
    before: tuple[Message, ...] = ()
    role: str = "user"
    tools: tuple[Tool, ...] = ()
    source: str = ""

    @property
    def messages(self) -> list[Message]:
        """The turns of the prompt, without the answer."""
        system: list[Message] = []
        if self.system is not None:
            system = [{"role": "system", "content": self.system}]
        return [*system, *self.before, {"role": self.role, "content": self.user}]

    @property
    def held_out(self) -> bool:
        """True for one example in ten, by a hash of its input, which is not trained on in any
        phrasing."""
        return is_held_out(self.source or self.application, self.input)


def is_held_out(application: str, given: str) -> bool:
    """Returns True for one input in ten."""
    digest = blake2b(f"{application}\n{given}".encode(), digest_size=2).digest()
    return int.from_bytes(digest) % 10 == 0


@dataclass(frozen=True)
class Phrasing:
    """Instructions of an application. {0} is the whole input, {1} and {2} are its fields."""

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
LARGEST = 300  # largest number with a token
PLAIN_SHARE = 0.18  # of examples; for raw /v1/completions prompts
SYSTEM_SHARE = 0.35
GENERIC_SYSTEM_SHARE = 0.1
MULTI_TURN_SHARE = 0.06  # of conversations
EXCHANGE_SHARE = 0.02  # of conversations
ZERO_SHARE = 0.2  # of counts start or end at 0, which would otherwise be rare


def make_example(
    rng: Random, application: str, given: str, answer: str, phrasing: Phrasing | None = None
) -> Example:
    """Returns the example in a random form, of the application's phrasing if none is given."""
    phrasing, form = phrasing or PHRASINGS[application], rng.random()
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


def _task_on_words(
    application: str,
    max_words: int,
    answer: Callable[[list[str]], str],
    pool: tuple[str, ...] = WORDS,
) -> Callable[[Random], Example]:
    """Returns a task on 1 to `max_words` different words."""

    def draw(rng: Random) -> Example:
        words = rng.sample(pool, rng.randint(1, max_words))
        return make_example(rng, application, " ".join(words), answer(words))

    return draw


def _line_per_word(answer: Callable[[str], str]) -> Callable[[list[str]], str]:
    return lambda words: "\n".join(f"{word}: {answer(word)}" for word in words)


def _numbered_list(words: list[str]) -> str:
    return "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def add(rng: Random) -> Example:
    """Adds two two-digit numbers step by step: parts, ones, tens, and the sum."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    parts = (a % 10, b % 10, a - a % 10, b - b % 10)
    ones, tens = parts[0] + parts[1], parts[2] + parts[3]
    split = f"{a} is {parts[2]} + {parts[0]}, {b} is {parts[3]} + {parts[1]}"
    sums = f"{parts[0]} + {parts[1]} = {ones}, {parts[2]} + {parts[3]} = {tens}"
    return make_example(rng, "add", f"{a} {b}", f"{split}, {sums}, {tens} + {ones} = {a + b}.")


def _span(rng: Random, largest: int) -> tuple[int, int]:
    """Draws 0 <= low < high <= largest. Most spans are short, a few have the maximum length."""
    length = round((largest - 1) ** rng.random() ** 1.5)
    low = 0 if rng.random() < ZERO_SHARE else rng.randint(1, largest - length)
    return low, low + length


def count(rng: Random) -> Example:
    """Counts from the first number up to the second."""
    low, high = _span(rng, LARGEST)
    return make_example(rng, "count", f"{low} {high}", " ".join(map(str, range(low, high + 1))))


def countdown(rng: Random) -> Example:
    """Counts from the first number down to the second."""
    low, high = _span(rng, LARGEST)
    return make_example(
        rng, "countdown", f"{high} {low}", " ".join(map(str, range(high, low - 1, -1)))
    )


def repeat(rng: Random) -> Example:
    """Repeats a word on 2 to 120 numbered lines."""
    word, times = rng.choice(WORDS), round(2 * 60 ** rng.random())
    answer = "\n".join(f"{word} {i}" for i in range(1, times + 1))
    return make_example(rng, "repeat", f"{word} {times}", answer)


TASKS: dict[str, Callable[[Random], Example]] = {
    "copy": _task_on_words("copy", 16, " ".join),
    "reverse": _task_on_words("reverse", 12, lambda words: " ".join(reversed(words))),
    "sort": _task_on_words("sort", 5, lambda words: " ".join(sorted(words))),
    "list": _task_on_words("list", 16, _numbered_list),
    "classify": _task_on_words("classify", 8, _line_per_word(KIND_OF.__getitem__)),
    "spell": _task_on_words("spell", 6, _line_per_word("-".join)),
    "translate": _task_on_words("translate", 8, _line_per_word(veldish)),
    "emoji": _task_on_words(
        "emoji", 10, lambda words: "".join(EMOJI[word] for word in words), tuple(EMOJI)
    ),
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
    """A further training pass and its mixture of tasks. `steps` and `rate` are factors on those of
    the first pass."""

    steps: float
    rate: float
    shares: Mapping[str, float]
    multi_turn: float = MULTI_TURN_SHARE
    exchanges: float = EXCHANGE_SHARE
    agents: float = 0.0


# Later passes draw the tasks that are learned last more often: orders and directions, then orders,
# long copies and multi-turn conversations, then greetings in every spelling and counts with 0, then
# tools, JSON and thinking.
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
    Revision(
        0.22,
        0.4,
        {**SHARES, "reverse": 4, "sort": 4, "count": 2, "countdown": 2},
        multi_turn=0.1,
        exchanges=0.08,
        agents=0.4,
    ),
)


def stream(
    rng: Random,
    held_out: bool,
    shares: Mapping[str, float] = SHARES,
    tasks: Mapping[str, Callable[[Random], Example]] = TASKS,
) -> Iterator[Example]:
    """Yields examples of the applications in `shares`, endlessly: held-out ones or the others."""
    while True:
        (application,) = rng.choices(tuple(shares), tuple(shares.values()))
        example = tasks[application](rng)
        if example.held_out == held_out:
            yield example


def examples(seed: int, n: int, held_out: bool) -> list[Example]:
    """Returns `n` examples over all tasks, the same for the same arguments."""
    return list(islice(stream(Random(seed), held_out), n))
