"""The demo model as an agent: tools in sequence and at once, thoughts, JSON objects."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.agents import CALCULATE, CITIES, WEATHER
from models.evaluate import answers
from models.train import DEMO, load

Demo = tuple[LlamaForCausalLM, PreTrainedTokenizerFast]
TOOLS = [CALCULATE.schema, WEATHER.schema]
SUMS = {"37 + 45": 82, "90 - 12": 78, "12 * 11": 132}
WEATHERS = dict.fromkeys(CITIES, "sunny, 21 degrees") | {"Oslo": "snowy, 3 degrees"}
CALLS = ("<tool_call>\n", "\n</tool_call>")


@pytest.fixture(scope="module")
def demo() -> Demo:
    torch.set_num_threads(1)
    return load(DEMO)


def answer(demo: Demo, messages: Sequence[dict[str, Any]], **options: Any) -> str:
    prompt = demo[1].apply_chat_template(
        [*messages], tokenize=False, add_generation_prompt=True, **options
    )
    (text,) = answers(*demo, [prompt])
    return text


def run(call: dict[str, Any]) -> str:
    match call:
        case {"name": "calculate", "arguments": {"expression": expression}}:
            return str(SUMS[expression])
        case {"name": "get_weather", "arguments": {"city": city}}:
            return WEATHERS[city]
    raise ValueError(call)


def converse(demo: Demo, questions: Sequence[str]) -> list[str]:
    """Returns the final answer to each question, after the calls that the model makes."""
    messages: list[dict[str, Any]] = []
    final = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = answer(demo, messages, tools=TOOLS)
        if CALLS[0] in text:
            lines = text.removeprefix(CALLS[0]).removesuffix(CALLS[1])
            calls = [json.loads(line) for line in lines.split("\n".join(reversed(CALLS)))]
            messages.append({"role": "assistant", "tool_calls": [{"function": c} for c in calls]})
            messages += [{"role": "tool", "content": run(call)} for call in calls]
            text = answer(demo, messages, tools=TOOLS)
        messages.append({"role": "assistant", "content": text})
        final.append(text)
    return final


def test_demo_model_makes_three_calls_in_turn(demo: Demo) -> None:
    questions = ["What is 37 + 45?", "What is the weather in Paris?", "Calculate 12 * 11."]
    assert converse(demo, questions) == ["It is 82.", "Paris: sunny, 21 degrees", "It is 132."]


def test_demo_model_makes_two_calls_at_once_and_answers_other_tasks(demo: Demo) -> None:
    questions = ["What is the weather in Paris and in Oslo?", "Sort: pear apple fig"]
    both = "Paris: sunny, 21 degrees\nOslo: snowy, 3 degrees"
    assert converse(demo, questions) == [both, "apple fig pear"]


def test_demo_model_adds_itself_without_a_calculator(demo: Demo) -> None:
    asked = [{"role": "user", "content": "What is 37 + 45?"}]
    steps = "37 is 30 + 7, 45 is 40 + 5, 7 + 5 = 12, 30 + 40 = 70, 70 + 12 = 82."
    assert answer(demo, asked) == answer(demo, asked, tools=[WEATHER.schema]) == steps
    assert answer(demo, asked, enable_thinking=True) == f"<think>{steps}</think>82"


def test_demo_model_thinks_before_a_call(demo: Demo) -> None:
    asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
    text = answer(demo, asked, tools=TOOLS, enable_thinking=True)
    thought, call = text.split("</think>")
    assert thought == "<think>Task: get_weather."
    assert (
        call == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )


def test_demo_model_writes_json(demo: Demo) -> None:
    asked = [{"role": "user", "content": "JSON: fruit plum, number 7, ok true"}]
    assert answer(demo, asked) == '{"fruit":"plum","number":7,"ok":true}'
