"""Grammars of tool calls in every format: texts they accept, and not."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gateway.grammars.compilation import GrammarFault, compile_constraint
from gateway.readers.calls.formats import CALL_FORMATS
from gateway.readers.calls.kinds import WrittenCalls
from gateway.readers.constraints import constrain_calls
from gateway.readers.formats import select_formats
from gateway.types.constraint import Constraint, ConstraintKind
from gateway.types.tools import Tool, ToolUse
from tests.gateway.gateway_fakes import demo_text
from tests.gateway.grammars.walks import accepts, demo_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "uniqueItems": False}},
    "required": ["a"],
    "additionalProperties": False,
}
AUTO = ToolUse((Tool("f", parameters=SCHEMA, strict=True), Tool("g")))
REQUIRED = replace(AUTO, required=True)
FORMATS = CALL_FORMATS
Arguments = Mapping[str, object]
F: tuple[str, Arguments] = ("f", {"a": 1})
G: tuple[str, Arguments] = ("g", {"x": []})
BAD: tuple[str, Arguments] = ("f", {"b": [1]})
YES_NO = Constraint(ConstraintKind.REGEX, "yes|no")


def write_arguments(written: WrittenCalls, arguments: Arguments) -> str:
    one = written.arguments
    if one is None:
        return json.dumps(arguments)
    texts = []
    for key, value in arguments.items():
        is_text = bool(one.close) and isinstance(value, str)
        before = one.before.replace("IS_TEXT", str(is_text).lower()).replace("KEY", key)
        texts.append(before + (str(value) if is_text else json.dumps(value)) + one.after)
    return one.separator.join(texts)


def write(written: WrittenCalls, *calls: tuple[str, Arguments]) -> str:
    texts = [
        written.before.replace("NAME", name) + write_arguments(written, arguments) + written.after
        for name, arguments in calls
    ]
    return written.opening + written.separator.join(texts) + written.closing


def grammar(
    name: str, use: ToolUse, answer: Constraint | None = None, after: str = ""
) -> str | None:
    formats = select_formats("", name, "none")
    constraint = constrain_calls(formats, use, answer, demo_text().split_specials)
    if constraint is None:
        return None
    behind = replace(constraint, after=[after] if after else ())
    return compile_constraint(behind, demo_tokenizer())


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_follow_their_schemas(name: str):
    written, made = FORMATS[name].written, grammar(name, REQUIRED)
    assert made is not None
    good = write(written, F)
    assert accepts(made, good) and accepts(made, write(written, F, G))
    assert not any(accepts(made, text) for text in ("", f"Hi {good}", write(written, BAD)))
    one = grammar(name, replace(REQUIRED, parallel=False))
    assert one is not None and accepts(one, good) and not accepts(one, write(written, F, G))


@pytest.mark.parametrize("name", FORMATS)
def test_strict_calls_within_free_text_follow_their_schemas(name: str):
    form, made = FORMATS[name], grammar(name, AUTO)
    written = form.written
    assert made is not None
    good, bad = write(written, F), write(written, BAD)
    assert all(accepts(made, text) for text in ("", "Hi", good, write(written, G, F)))
    assert not accepts(made, bad)
    bare = good.removeprefix(form.begins[0]) if form.begins else good
    for mark in form.begins:
        assert accepts(made, f"Hi {mark}{bare}")
        assert not accepts(made, f"Hi {mark}{bad.removeprefix(form.begins[0])}")
    if form.begins and not written.bare:
        assert accepts(made, f"Hi {good} and {good}")
    lax = ToolUse([Tool("f", parameters=SCHEMA)])
    assert grammar(name, lax) is None


@pytest.mark.parametrize("name", FORMATS)
def test_answer_follows_its_constraint_or_calls_tools(name: str):
    good = write(FORMATS[name].written, F)
    made = grammar(name, AUTO, YES_NO)
    assert made is not None
    assert accepts(made, "yes") and accepts(made, good) and not accepts(made, "perhaps")
    behind = grammar(name, AUTO, YES_NO, "</think>")
    assert behind is not None
    assert accepts(behind, "why < 2</think>\n\nyes") and accepts(behind, f"</think>{good}")
    assert not accepts(behind, "yes") and not accepts(behind, "</think>perhaps")


def test_constraint_applies_behind_reasoning():
    made = compile_constraint(replace(YES_NO, after=["</think>"]), demo_tokenizer())
    assert accepts(made, "so</think>yes") and not accepts(made, "so</think>perhaps")
    assert replace(YES_NO, after=["</think>"]).digest != YES_NO.digest


def test_tool_that_cannot_be_enforced_is_named():
    use = ToolUse((Tool("f"), Tool("g", parameters={"properties": {"a": {"not": {}}}})))
    with pytest.raises(GrammarFault, match=r"the parameters of g: .*\(at #/properties/a/not\)"):
        grammar("hermes", replace(use, required=True))


def test_special_tokens_are_written_by_their_ids():
    text = demo_text()
    [user] = text.encode("<|user|>")
    assert text.split_specials("a<|user|>b<|user|>") == ["a", user, "b", user]
    made = compile_constraint(replace(YES_NO, after=[user]), demo_tokenizer())
    assert f"<[{user}]>" in made
