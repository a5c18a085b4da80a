"""Requests of several applications with their own instructions and length relations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.forecast import Ints

Generator = np.random.Generator
WORD = "token"  # a user input is this word with the request's number, once per token


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths of at least 1 token, cut at `most`."""

    median: float
    sigma: float
    most: int

    def draw(self, count: int, rng: Generator) -> Ints:
        drawn = np.rint(self.median * np.exp(rng.normal(0.0, self.sigma, count)))
        return np.clip(drawn, 1, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Task:
    """Requests of one task: an instruction and a user input.

    The answer has `ratio` times the tokens of the user input, times a log-normal factor with
    `spread` as the standard deviation of its logarithm.
    """

    kind: str
    instruction: str
    user_input: LogNormal
    ratio: float
    spread: float

    @property
    def instruction_tokens(self) -> int:
        return len(self.instruction.split())

    def draw(self, count: int, rng: Generator) -> tuple[Ints, Ints]:
        """Draws the tokens of user inputs and answers."""
        inputs = self.user_input.draw(count, rng)
        factor = self.ratio * np.exp(rng.normal(0.0, self.spread, count))
        answers = np.clip(np.rint(inputs * factor), 1, MOST_TOKENS)
        return inputs, answers.astype(np.int64)


# The applications of Magnus (Cheng et al., ICWS 2024, §I, §IV-A), with its limit of 1,024 tokens.
# The paper prints no length. The ratios follow its text (§III-B): bug fixes are as long as the
# code, comments longer than it, Python shorter than the C++ it replaces, and C++ longer than the
# Python. The other numbers are chosen so that the two errors of its Table II for ChatGLM-6B follow:
# 34 tokens if an answer is taken to be as long as its input, 16 with a regressor per task; and a
# correlation above 0.8 in each task (Table I).
MOST_TOKENS = 1_024
MAGNUS_TASKS = (
    Task("mt", "Translate to German:", LogNormal(30, 0.6, 1_000), 1.1, 0.15),
    Task("mt", "Translate to English:", LogNormal(34, 0.6, 1_000), 0.9, 0.15),
    Task("gc", "Correct the grammar of this text:", LogNormal(28, 0.6, 1_000), 1.0, 0.08),
    Task("td", "Rewrite this text without offence:", LogNormal(22, 0.6, 1_000), 0.85, 0.25),
    Task("ct", "Translate this C++ code to Python:", LogNormal(120, 0.8, 1_000), 0.75, 0.12),
    Task("ct", "Translate this Python code to C++:", LogNormal(90, 0.8, 1_000), 1.3, 0.12),
    Task("bf", "Fix bugs in the following code and output the fixed code:",
         LogNormal(90, 0.8, 1_000), 1.0, 0.08),
    Task("cc", "Add a comment to the following code:", LogNormal(80, 0.8, 1_000), 1.25, 0.15),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """Requests in columns; `kinds` and `prompts` may be empty."""

    input_tokens: Ints
    output_tokens: Ints
    kinds: Sequence[str] = ()
    prompts: Sequence[str] = ()


def draw_tasks(tasks: Sequence[Task], count: int, rng: Generator) -> Drawn:
    """Draws `count` requests, each of a task drawn with equal probability. A prompt's first line is
    the instruction."""
    which = rng.integers(len(tasks), size=count)
    inputs, answers = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for number, task in enumerate(tasks):
        rows = np.flatnonzero(which == number)
        inputs[rows], answers[rows] = task.draw(len(rows), rng)
    chosen = [tasks[number] for number in which.tolist()]
    instructions = np.array([task.instruction_tokens for task in chosen])
    prompts = [
        f"{task.instruction}\n{' '.join([f'{WORD}{row}'] * tokens)}"
        for row, (task, tokens) in enumerate(zip(chosen, inputs.tolist(), strict=True))
    ]
    return Drawn(inputs + instructions, answers, [task.kind for task in chosen], prompts)
