"""Readers of tool calls: hand-worked answers, and every division of a text."""

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.readers.calls.formats import CALL_FORMATS
from gateway.readers.calls.reader import CallRules
from gateway.readers.calls.xml_formats import XML_FORMATS
from gateway.readers.calls.xml_reader import XmlCallReader
from gateway.readers.formats import select_formats
from gateway.readers.joined import join_parts
from gateway.types.answer_parts import (
    Content,
    ToolCallArguments,
    ToolCallMalformed,
    ToolCallStart,
)
from gateway.types.tools import Tool, ToolUse
from tests.gateway.readers.answers import ANSWERS, USE, formats, joined, open_reader, read

FORMATS = st.sampled_from(sorted(CALL_FORMATS))
MARKS = sorted({mark for form in CALL_FORMATS.values() for mark in form.begins})
PIECES = (
    "<think>",
    "</think>",
    "</tool_call>",
    '{"name": "f", "arguments": ',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    " ",
    "\n",
    ",",
    ";",
    "f(a=1)",
    "x",
    "</tool_calls>",
    "<function=f>",
    *MARKS,
)
TEXTS = st.lists(st.sampled_from([*PIECES, *(text for _, text, _, _ in ANSWERS)]), max_size=8).map(
    "".join
)  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_answer_says_the_same_in_every_division(name, text, content, calls):
    form = formats(name)
    expected = (content, "", calls)
    assert joined(form, [text]) == expected
    assert joined(form, list(text)) == expected
    for at in range(len(text)):
        assert joined(form, [text[:at], text[at:]]) == expected, text[:at]


@given(FORMATS, TEXTS, st.data())
def test_parts_do_not_depend_on_the_division(name: str, text: str, data: st.DataObject):
    form = select_formats("", name, data.draw(st.sampled_from(("none", "qwen3", "deepseek_r1"))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = joined(form, [text])
    assert joined(form, pieces) == whole
    assert joined(form, list(text)) == whole


@given(FORMATS, TEXTS)
def test_nothing_of_an_answer_without_calls_and_reasoning_is_lost(name: str, text: str):
    content, _, calls = joined(formats(name), [text])
    if not calls:
        assert content == text


def test_arguments_are_streamed_as_they_arrive():
    reader = open_reader(formats("hermes"), USE, "")
    assert reader is not None
    assert reader.feed('Hi <tool_call>{"name": "f", "argu') == [Content("Hi")]
    start, first = reader.feed('ments": {"a"')
    assert isinstance(start, ToolCallStart)
    assert (start.index, start.name, start.call_id[:5]) == (0, "f", "call_")
    assert first == ToolCallArguments(0, '{"a"')
    assert reader.feed(": 1") == [ToolCallArguments(0, ": 1")]
    assert reader.feed("}}</tool_call>") == [ToolCallArguments(0, "}")]
    assert not reader.finish()


def test_call_that_turns_out_malformed_is_withdrawn():
    text = '<tool_call>{"name": "f", "arguments": {"a": x'
    start, arguments, malformed, rest = read(formats("hermes"), [text])
    assert isinstance(start, ToolCallStart)
    assert arguments == ToolCallArguments(0, '{"a": ')
    assert malformed == ToolCallMalformed(0, text[:-1])
    assert rest == Content("x")
    assert join_parts([start, arguments, malformed, rest]).content == text


def test_call_that_a_limit_cuts_keeps_its_beginning():
    reader = open_reader(formats("hermes"), USE, "")
    assert reader is not None
    parts = [
        *reader.feed('<tool_call>{"name": "f", "arguments": {"a": 1'),
        *reader.finish(cut=True),
    ]
    [call] = join_parts(parts).calls
    assert (call.name, call.arguments) == ("f", '{"a": 1')


@pytest.mark.parametrize(("name", "text", "content", "calls"), ANSWERS)
def test_answer_without_parallel_calls_has_the_first_one(name, text, content, calls):
    use = ToolUse(USE.tools, parallel=False)
    assert joined(formats(name), [text], use)[2] == calls[:1]


def test_ended_reader_is_freed_at_once():
    form = select_formats("", "hermes", "qwen3")
    for text in ("<think>so</think>Hi <tool_call>", "Hi", "<think>so", ANSWERS[0][1]):
        reader = open_reader(form, USE, "")
        assert reader is not None
        reader.feed(text)
        reader.finish()
        freed = weakref.ref(reader)
        del reader
        assert freed() is None


def test_ids_are_those_that_templates_accept():
    texts = {
        "mistral": '[TOOL_CALLS]f{"a": 1}',
        "hermes": '<tool_call>{"name": "f", "arguments": {',
    }
    starts = {name: read(formats(name), [text])[0] for name, text in texts.items()}
    ids = {name: part.call_id for name, part in starts.items() if isinstance(part, ToolCallStart)}
    assert len(ids["mistral"]) == 9 and ids["mistral"].isalnum()
    assert len(ids["hermes"]) == 29


def test_no_mark_is_the_beginning_of_another_in_its_format():
    for form in CALL_FORMATS.values():
        marks = form.begins
        assert not any(a != b and a.startswith(b) for a in marks for b in marks)


@pytest.mark.parametrize("name", CALL_FORMATS)
def test_written_calls_are_read(name: str):
    """What a forced call writes is what the reader of the format reads."""
    written = CALL_FORMATS[name].written
    none = "" if written.arguments else "{}"
    calls = [written.before.replace("NAME", each) + none + written.after for each in ("f", "g")]
    text = written.opening + written.separator.join(calls) + written.closing
    assert joined(formats(name), [text]) == ("", "", [("f", "{}"), ("g", "{}")])
    assert not written.trigger or (written.opening + written.before).startswith(written.trigger)


@pytest.mark.parametrize("name", [name for name, form in CALL_FORMATS.items() if form.begins])
def test_reader_does_not_backtrack_within_many_blanks(name: str):
    text = CALL_FORMATS[name].begins[0] + " " * 200_000 + "x"
    assert joined(formats(name), [text]) == (text, "", [])


@pytest.mark.parametrize(
    ("name", "begin", "argument"),
    [
        ("qwen3_coder", "<tool_call><function=f>", "<parameter=a>"),
        ("glm45", "<tool_call>f", "<arg_key>a</arg_key><arg_value>"),
    ],
)
def test_call_without_the_end_of_an_argument_is_content(name: str, begin: str, argument: str):
    text = f"{begin}{argument * 2_000}</tool_call>"
    assert joined(formats(name), [text]) == (text, "", [])


class CountingReader(XmlCallReader):
    copied_chars = 0

    def _take(self, chars: int) -> str:
        self.copied_chars += len(self._text)
        return super()._take(chars)


def test_work_of_an_answer_in_one_piece_grows_with_its_length():
    form = XML_FORMATS["qwen3_coder"]
    rules = CallRules(form.begins, False, {"f": Tool("f")}, True, form.make_id)

    def count(arguments: int) -> float:
        reader = CountingReader(rules, [form.syntax])
        each = "<parameter=a>\n1\n</parameter>\n"
        text = f"<tool_call>\n<function=f>\n{each * arguments}</function>\n</tool_call>"
        parts = [*reader.feed(text), *reader.finish()]
        assert [type(part) for part in parts] == [ToolCallStart, ToolCallArguments]
        return reader.copied_chars / len(text)

    assert count(4_000) < 1.2 * count(500)


def test_unknown_name_is_an_error_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown name 'hermez'; known: auto, none, hermes, "):
        select_formats("", "hermez")
    with pytest.raises(ValueError, match=r"unknown name 'r1'; known: auto, none, qwen3, "):
        select_formats("", "hermes", "r1")


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("<tool_call>\n{{ x }} <think>", "hermes", "qwen3"),
        ("[TOOL_CALLS]", "mistral", None),
        ("<|python_tag|>", "llama3_json", None),
        ("no tools", None, None),
        ("<function=example_function_name> <tool_call>", "qwen3_coder", None),
    ],
)
def test_formats_are_found_in_the_chat_template(template, calls, reasoning):
    assert select_formats(template) == select_formats("", calls or "none", reasoning or "none")


def test_answer_without_tools_and_reasoning_has_no_reader():
    form = select_formats("<tool_call> <think>", "auto", "none")
    assert open_reader(form, None, "") is None
    assert open_reader(form, ToolUse(), "") is None
    assert open_reader(select_formats("", "none", "none"), ToolUse((Tool("f"),)), "") is None
