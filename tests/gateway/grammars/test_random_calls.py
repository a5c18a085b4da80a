"""Every text that a grammar of calls accepts is read back as calls with valid arguments."""

import json
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from gateway.grammars.compiling.compilation import compile_constraint
from gateway.readers.calls.formats import CALL_FORMATS
from gateway.readers.calls.kinds import CallFormat
from gateway.readers.constraints import constrain_calls
from gateway.readers.formats import select_formats
from gateway.types.tools import Tool, ToolUse
from tests.examples import examples
from tests.gateway.gateway_fakes import demo_text
from tests.gateway.grammars.walks import demo_tokenizer, draw_answer
from tests.gateway.readers.answers import joined

FORMATS = sorted({id(form): name for name, form in CALL_FORMATS.items()}.values())
TEXTS = (
    "</parameter>",
    "\n</parameter>\n",
    "</arg_value>",
    "</tool_call>",
    '"',
    "\\",
    "\n",
    "]",
    ")",
)
VALUES = st.sampled_from(
    (
        {"type": "string"},
        {"type": "string", "pattern": "^(a|b)[/<]{1,3}$"},
        {"type": "string", "pattern": "x"},
        {"type": "string", "minLength": 1, "maxLength": 15},
        {"type": "string", "format": "date"},
        {"enum": ["1", "Rome", "a\"b\n"]},
        {"enum": ["1", 1, None]},
        {"const": "true"},
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        {"$ref": "#/$defs/word"},
        {"$ref": "#/$defs/tree"},
    )
)  # fmt: skip
DEFINITIONS = {
    "word": {"type": "string", "maxLength": 5},
    "tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}},
             "additionalProperties": False},
}  # fmt: skip
HUGE = re.compile(r"[eE]\+?\d{3}|\d{300}")  # numbers that Python reads as infinite
KEYS = ("a", "b_2", "größe", "e")


def begin(name: str, form: CallFormat) -> str:
    """The beginning of an answer that calls a function."""
    return (form.written.opening + form.written.before).replace("NAME", name)


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, object]:
    properties = draw(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
    required = [key for key in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required,
            "additionalProperties": False, "$defs": DEFINITIONS}  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(FORMATS), parameters(), parameters(), st.booleans(), st.booleans(), st.data()
)
def test_every_call_of_a_grammar_is_read_with_valid_arguments(
    name: str, f: dict, g: dict, required: bool, parallel: bool, data: st.DataObject
):
    form, formats = CALL_FORMATS[name], select_formats("", name, "none")
    tools = (Tool("f", parameters=f, strict=True), Tool("g.h", parameters=g, strict=True))
    use = ToolUse(tools, required, parallel)
    constraint = constrain_calls(formats, use, None, demo_text().split_specials)
    assert constraint is not None
    grammar = compile_constraint(constraint, demo_tokenizer())
    random = Random(data.draw(st.integers(0, 2**32)))
    text = draw_answer(grammar, random, 150, begin("f", form), (*TEXTS, *form.begins))
    if text is None:
        return
    content, _, calls = joined(formats, [text], use)
    assert calls and not (required and content)
    assert parallel or len(calls) == 1
    for called, arguments in calls:
        Draft202012Validator(f if called == "f" else g).validate(json.loads(arguments))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert joined(formats, pieces, use) == joined(formats, list(text), use)
    assert joined(formats, pieces, use) == (content, "", calls)


@pytest.mark.parametrize("name", FORMATS)
def test_any_arguments_of_a_tool_without_parameters_are_read(name: str):
    formats = select_formats("", name, "none")
    use = ToolUse((Tool("f"),), required=True)
    constraint = constrain_calls(formats, use, None, demo_text().split_specials)
    assert constraint is not None
    grammar = compile_constraint(constraint, demo_tokenizer())
    for seed in range(5):
        text = draw_answer(grammar, Random(seed), 250, begin("f", CALL_FORMATS[name]), TEXTS)
        if text is not None and not HUGE.search(text):
            content, _, calls = joined(formats, list(text), use)
            assert calls and not content
            assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("name", FORMATS)
def test_lax_tools_beside_a_strict_one_are_called_in_free_text(name: str):
    form, formats = CALL_FORMATS[name], select_formats("", name, "none")
    lax = Tool("g", parameters={"properties": {"s": {"type": "string"}}, "required": ["s"]})
    use = ToolUse((Tool("f", strict=True), lax))
    constraint = constrain_calls(formats, use, None, demo_text().split_specials)
    assert constraint is not None
    grammar = compile_constraint(constraint, demo_tokenizer())
    for seed in range(3):
        text = draw_answer(grammar, Random(seed), 250, begin("g", form), TEXTS)
        if text is not None:
            assert joined(formats, [text], use)[2][0][0] == "g"
