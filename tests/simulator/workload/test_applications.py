"""The workloads of SCLS and Magnus have the properties that the papers print."""

import numpy as np
import pytest

from services.forecast import Floats
from services.predictor.encoder.extract import split_prompt
from simulator.workload.applications import MAGNUS_TASKS, MOST_TOKENS, Task
from simulator.workload.builtin import build_workload

COUNT = 20_000


def rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(values**2)))


def residuals(task: Task) -> tuple[Floats, Floats]:
    """Errors of the input length as forecast, and of a line fitted to the task."""
    inputs, answers = task.draw(COUNT, np.random.default_rng(0))
    fitted = np.polyval(np.polyfit(inputs, answers, 1), inputs)
    return (answers - inputs).astype(float), answers - fitted


def test_magnus_tasks_have_the_errors_of_its_table_ii():
    """33.961 tokens for the input length alone, 16.158 with a regressor per task."""
    raw, fitted = zip(*map(residuals, MAGNUS_TASKS), strict=True)
    assert rms(np.concatenate(raw)) == pytest.approx(33.961, rel=0.1)
    assert rms(np.concatenate(fitted)) == pytest.approx(16.158, rel=0.1)


@pytest.mark.parametrize("task", MAGNUS_TASKS, ids=lambda task: task.instruction)
def test_magnus_answers_correlate_with_their_inputs(task: Task):
    inputs, answers = task.draw(COUNT, np.random.default_rng(1))
    assert np.corrcoef(inputs, answers)[0, 1] > 0.8
    assert answers.max() <= MOST_TOKENS


def test_magnus_prompt_is_the_instruction_and_as_many_words_as_the_user_input():
    made = build_workload("magnus", 200, "burst", 0.0, 0, 0)
    tasks = {task.instruction: task for task in MAGNUS_TASKS}
    for kind, prompt, tokens in zip(made.kinds, made.prompts, made.input_tokens, strict=True):
        instruction, user_input = split_prompt("", prompt)
        task = tasks[instruction]
        assert task.kind == kind
        assert task.instruction_tokens + len(user_input.split()) == tokens
    assert set(made.kinds) == {"mt", "gc", "td", "ct", "bf", "cc"}


def test_codefuse_answers_are_mostly_shorter_than_512_tokens():
    made = build_workload("codefuse", COUNT, "burst", 0.0, 0, 0)
    assert (made.output_tokens < 512).mean() == pytest.approx(0.9, abs=0.01)
    assert max(made.input_tokens.max(), made.output_tokens.max()) == 1_024
