"""Readers of reasoning: hand-worked answers in every division."""

import pytest

from gateway.readers.reasoning import REASONING_FORMATS, ReasoningReader
from tests.gateway.readers.answers import F1, USE, formats, joined, open_reader

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
# Format, end of the prompt, text, reasoning, content.
ANSWERS = [
    ("qwen3", "", "<think>\nso < 2\n</think>\n\nHi", "so < 2", "Hi"),
    ("qwen3", "", "Hi <think>x</think>", "", "Hi <think>x</think>"),
    ("qwen3", "", "<thin", "", "<thin"),
    ("qwen3", "", "\n<think></think>\nHi ", "", "Hi "),
    ("qwen3", "<think>\n", "so\n</think>\nHi", "so", "Hi"),
    ("qwen3", "<think>\n", "<think> so</think>Hi", "so", "Hi"),
    ("qwen3", "<think>\n\n</think>\n\n", "Hi </think>", "", "Hi </think>"),
    ("qwen3", "<think>\n", "so </think", "so </think", ""),
    ("deepseek_r1", "", "so</think>Hi", "so", "Hi"),
    ("deepseek_r1", "", "<think>so</think>Hi", "so", "Hi"),
    ("deepseek_r1", "", "so", "so", ""),
    ("mistral", "", "[THINK]so[/THINK]Hi", "so", "Hi"),
    ("granite", "", "Here is my thought process: so\nHere is my response: Hi", "so", "Hi"),
]


@pytest.mark.parametrize(("name", "prompt_end", "text", "reasoning", "content"), ANSWERS)
def test_answer_says_the_same_in_every_division(name, prompt_end, text, reasoning, content):
    form = formats("hermes", name)
    for rest, calls in (("", []), (CALL, [F1])):
        whole = text + rest if content else text
        expected = (content.rstrip() if rest and content else content, reasoning,
                    calls if content else [])  # fmt: skip
        assert joined(form, [whole], USE, prompt_end) == expected
        assert joined(form, list(whole), USE, prompt_end) == expected
        for at in range(len(whole)):
            assert joined(form, [whole[:at], whole[at:]], USE, prompt_end) == expected


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_every_format_separates_reasoning(name: str):
    marks = REASONING_FORMATS[name]
    text = f"{marks.start}why{marks.end}Hi"
    assert joined(formats("none", name), list(text)) == ("Hi", "why", [])


@pytest.mark.parametrize(
    ("pieces", "chars", "passes"),
    [
        (["<think>", "so</thi", "nk>", "\n", "Hi"], len("<think>so</think>"), True),
        (["Hi", " you"], 0, True),
        (["<think>so", " on"], len("<think>so on"), False),
    ],
)
def test_reasoning_counts_its_characters_and_then_passes(pieces, chars, passes):
    reader = open_reader(formats("none", "qwen3"), None, "")
    assert isinstance(reader, ReasoningReader)
    for piece in pieces:
        reader.feed(piece)
    assert reader.reasoning_chars == chars
    assert reader.passes == passes
