"""The reader by a tokenizer's response template: hand-worked answers in every division."""

import subprocess
import sys

import pytest

from gateway.readers.formats import select_formats
from tests.gateway.readers.answers import F1, G0, joined

TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "reasoning_content": {"open": "<|think|>", "close": "<|/think|>"},
        "content": {},
        "tool_calls": {
            "open": "<|call|>",
            "close": "<|/call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
FORMATS = select_formats("", response_template=TEMPLATE)
CALL_F = '<|call|>{"name": "f", "arguments": {"a": 1}}<|/call|>'
CALL_G = '<|call|>{"name": "g", "arguments": {}}<|/call|>'
BAD = '<|call|>{"name": "f", "arguments": {"a": }<|/call|>'
UNKNOWN = CALL_F.replace('"f"', '"h"')
ANSWERS = [
    ("", "Hi <x", "Hi <x", "", []),
    ("", "<|think|>so<|/think|>Hi", "Hi", "so", []),
    ("<|assistant|><|think|>", "so<|/think|>Hi", "Hi", "so", []),
    ("", f"Hi{CALL_F}{CALL_G}", "Hi", "", [F1, G0]),
    ("", f"Hi{BAD} x{CALL_F}", f"Hi{BAD} x{CALL_F}", "", []),
    ("", f"Hi{UNKNOWN}", f"Hi{UNKNOWN}", "", []),
    ("", "Hi<|call|>{", "Hi<|call|>{", "", []),
]


@pytest.mark.parametrize(("prompt_end", "text", "content", "reasoning", "calls"), ANSWERS)
def test_answer_says_the_same_in_every_division(prompt_end, text, content, reasoning, calls):
    expected = (content, reasoning, calls)
    for pieces in ([text], list(text), [text[:5], text[5:]], [text[:-3], text[-3:]]):
        assert joined(FORMATS, pieces, prompt_end=prompt_end) == expected


def test_known_format_of_the_chat_template_comes_first():
    assert select_formats("<tool_call>", response_template=TEMPLATE).whole is None
    assert select_formats("", "none", "none", TEMPLATE).whole is None


def test_readers_import_no_torch():
    code = "import sys, gateway.readers.applied; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
