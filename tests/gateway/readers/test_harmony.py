"""The reader of the harmony format: transcripts of its guide, and others, in every division."""

import pytest

from gateway.readers.formats import select_formats
from gateway.readers.harmony import HarmonyReader
from tests.gateway.readers.answers import F1, G0, USE, formats, joined, open_reader

FORMATS = formats("openai", "auto")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL_F = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
# Text, content, reasoning, calls.
ANSWERS = [
    (f"{ANALYSIS}so{NEXT}{FINAL}Hi", "Hi", "so", []),
    (f"{ANALYSIS}so{NEXT}{FINAL}Hi<|return|>", "Hi", "so", []),
    (f"{ANALYSIS}so{NEXT}{CALL_F}<|call|>", "", "so", [F1]),
    (f"{ANALYSIS}so{NEXT}{CALL_F}", "", "so", [F1]),
    # A preamble before the call, and the recipient in the role.
    ("<|channel|>commentary<|message|>I look."
     f'{NEXT} to=functions.f<|channel|>commentary json<|message|>{{"a": 1}}', "I look.", "", [F1]),
    (' to=functions.f<|channel|>commentary<|message|>{"a": 1}<|call|><|start|>assistant'
     " to=functions.g<|channel|>commentary<|message|>{}<|call|>", "", "", [F1, G0]),
    (f"{ANALYSIS}not <|call|> or {FINAL}yet{NEXT}{FINAL}Hi", "Hi", f"not <|call|> or {FINAL}yet",
     []),
    ("Hi <| you", "Hi <| you", "", []),
    (f"<|channel|>??<|end|><|start|>assistant{ANALYSIS}so", "<|channel|>??<|end|>", "so", []),
    ("<|channel|>commentary to=functions.h<|message|>{}",
     "<|channel|>commentary to=functions.h<|message|>{}", "", []),
    (CALL_F.replace("1}", "}"), CALL_F.replace("1}", "}"), "", []),
    (CALL_F.replace('{"a": 1}', "1"), CALL_F.replace('{"a": 1}', "1"), "", []),
    (f"<|channel|>commentary to=python code<|message|>1 + 1{NEXT}{FINAL}Hi", "Hi", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), ANSWERS)
def test_answer_says_the_same_in_every_division(text, content, reasoning, calls):
    expected = (content, reasoning, calls)
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert joined(FORMATS, pieces) == expected


@pytest.mark.parametrize("at", range(1, len(CALL_F)))
def test_limit_within_a_message_keeps_what_was_said(at: int):
    reader = open_reader(FORMATS, USE, "")
    assert isinstance(reader, HarmonyReader)
    parts = [*reader.feed(f"{ANALYSIS}so{NEXT}{CALL_F}"[: len(ANALYSIS) + 2 + len(NEXT) + at])]
    parts += reader.finish(cut=True)
    said = "".join(getattr(part, "text", "") for part in parts)
    assert said.startswith("so") and '{"a": 1}'.startswith(said.removeprefix("so"))
    assert reader.reasoning_chars == len(ANALYSIS) + 2 + len("<|end|>")


def test_format_is_found_in_the_chat_template_and_by_vllms_names():
    template = "<|start|>assistant<|channel|>analysis<|message|>"
    for form in (formats("openai"), formats("auto", "openai_gptoss"), formats("openai", "auto")):
        assert form.whole is not None
    assert select_formats(template) == formats("openai")
