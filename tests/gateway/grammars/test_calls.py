"""Grammars of tool calls in every format: texts they accept, and not."""

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gateway.grammars.compiling.compilation import compile_constraint
from gateway.grammars.faults import GrammarFault
from gateway.readers.calls.formats import CALL_FORMATS, HERMES
from gateway.readers.calls.kinds import WrittenCalls
from gateway.readers.constraints import Spell, constrain_calls
from gateway.readers.formats import select_formats
from gateway.types.constraint import Constraint, ConstraintKind
from gateway.types.tools import Tool, ToolUse
from services.runtime.errors import InvalidArgument
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
FORMATS = {name: form for name, form in CALL_FORMATS.items() if not form.written.channels}
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
        is_text = bool(one.not_text) and isinstance(value, str)
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
    name: str,
    use: ToolUse,
    answer: Constraint | None = None,
    after: str = "",
    spell: Spell | None = None,
) -> str | None:
    formats = select_formats("", name, "none")
    constraint = constrain_calls(formats, use, answer, spell or demo_text().split_specials)
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
    for mark in (each for each in form.begins if each not in written.unwritten):
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


ANY_JSON = Constraint(ConstraintKind.JSON_SCHEMA, "{}")
NAMED = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'
NAMED_JSON = Constraint(ConstraintKind.JSON_SCHEMA, NAMED)
OBJECTS = ('{"name":"f"}', '{"name": "f", "n": 1}', '{ "name":"ff","m":[]}', '{"name": ""}')


@pytest.mark.parametrize("name", FORMATS)
def test_answer_is_json_in_any_spacing_or_calls_tools(name: str):
    written = FORMATS[name].written
    for after in ("", "</think>"):
        named, any_json = (grammar(name, AUTO, each, after) for each in (NAMED_JSON, ANY_JSON))
        assert named is not None and any_json is not None
        for text in (write(written, F), write(written, F, G), *OBJECTS):
            assert accepts(named, after + text) and accepts(any_json, after + text), text
        assert not any(accepts(named, after + text) for text in ('{"a":1}', '{"name": 1}', "[]"))
        for text in ('{"a":1}', "{}", "[false]", "[[]]", "[1, 2]", "null", '{"name":{"name":1}}'):
            assert accepts(any_json, after + text), text
        assert written.bare or not accepts(named, after + write(written, BAD))


def test_call_in_place_of_json_follows_references_and_patterns():
    parameters = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/n"}, "f": {"$ref": "#"}},
        "required": ["n"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "string", "pattern": "^.b$"}},
    }
    use = ToolUse((Tool("f", parameters=parameters, strict=True),))
    needs_x = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object", "required": ["x"]}')
    made, written = grammar("llama3_json", use, needs_x), FORMATS["llama3_json"].written
    assert made is not None and accepts(made, '{"x":1}')
    for arguments, good in (
        ({"n": "ab"}, True),
        ({"n": "abc"}, False),
        ({"n": "ab", "f": {"n": "bb"}}, True),
        ({"n": "ab", "f": {"n": "b"}}, False),
    ):
        assert accepts(made, write(written, ("f", arguments))) == good
        assert accepts(made, write(written, ("f", {"n": "ab"}), ("f", arguments))) == good


def test_channels_hold_thoughts_and_then_a_call_or_the_content():
    written = CALL_FORMATS["openai"].written
    call, bad = write(written, F), write(written, BAD)
    think = "<|channel|>analysis<|message|>so<|fin|><|start|>assistant"
    final = "<|channel|>final<|message|>"

    def spell(text: str) -> list[str | int]:  # <|end|> ends the answers of the demo model
        return [text.replace("<|end|>", "<|fin|>")]

    forced = grammar("openai", REQUIRED, spell=spell)
    strict = grammar("openai", AUTO, spell=spell)
    answered = grammar("openai", AUTO, YES_NO, spell=spell)
    assert forced and strict and answered
    for made in (forced, strict, answered):
        assert accepts(made, call) and accepts(made, think + think + call)
        assert not any(accepts(made, text) for text in (bad, think + bad, think, "", call + call))
    assert not accepts(forced, f"{final}Hi")
    assert accepts(strict, f"{think}{final}Hi")
    assert accepts(answered, f"{think}{final}yes") and not accepts(answered, f"{final}Hi")


def test_text_is_what_its_reader_reads():
    schema = {"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]}
    use = ToolUse((Tool("f", parameters=schema, strict=True),), required=True)
    made = grammar("qwen3_coder", use)
    assert made is not None
    for value in ("", "\n", "a</parameter>b", " <function=f>", "é\n\n"):
        assert accepts(made, write(CALL_FORMATS["qwen3_coder"].written, ("f", {"s": value})))
    for value in ("</parameter>", "a\n</function>", "\n<parameter=a>"):
        assert not accepts(made, write(CALL_FORMATS["qwen3_coder"].written, ("f", {"s": value})))
    made = grammar("glm45", use)
    assert made is not None
    for value, good in (("</tool_call>", True), ("a</arg_value>", False)):
        text = write(CALL_FORMATS["glm45"].written, ("f", {"s": value}))
        assert accepts(made, text) == good


@pytest.mark.parametrize(
    ("name", "tool", "sentence"),
    [
        ("glm45", Tool("f", parameters={"minProperties": 1}), "of f: minProperties cannot be"),
        ("glm45", Tool("f", parameters={"properties": {"a b": {}}}), "the name 'a b' cannot be"),
        ("pythonic", Tool("f", parameters={"properties": {"from": {}}}), "the name 'from' cannot"),
        ("pythonic", Tool("f-g"), "f-g: its name cannot be written"),
        ("qwen3_coder", Tool("f", parameters={"properties": {"a": {"type": "string", "not": {}}}}),
         "not of a cannot be enforced"),
        ("glm47", Tool("f", parameters={"properties": {"a": {"$ref": "#"}}}), "must refer to"),
    ],
)  # fmt: skip
def test_tool_that_a_format_cannot_express_is_refused_or_forced_as_hermes(name, tool, sentence):
    with pytest.raises(InvalidArgument, match=sentence) as error:
        grammar(name, ToolUse([replace(tool, strict=True)]))
    assert error.value.field == "tools"
    assert select_formats("", name, "none").calls_of(ToolUse([tool], required=True)) is HERMES


@pytest.mark.parametrize("text", [{"pattern": "^a|b$"}, {"pattern": "a$b"}, {"format": "iri"}])
def test_text_that_cannot_be_enforced_names_the_tool(text: dict):
    parameters = {"properties": {"a": {"type": "string", **text}}}
    use = ToolUse([Tool("f", parameters=parameters)], required=True)
    with pytest.raises(GrammarFault, match=rf"the parameters of f: {next(iter(text))} "):
        grammar("glm45", use)


def test_constraint_applies_behind_reasoning():
    made = compile_constraint(replace(YES_NO, after=["</think>"]), demo_tokenizer())
    assert accepts(made, "so</think>yes") and not accepts(made, "so</think>perhaps")
    assert replace(YES_NO, after=["</think>"]).digest != YES_NO.digest


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (ConstraintKind.CHOICE, '["yes", "no"]'),
        (ConstraintKind.GRAMMAR, 'root ::= "yes" | "no"'),
        (ConstraintKind.STRUCTURAL_TAG, '{"type": "const_string", "value": "yes"}'),
    ],
)
def test_constraint_of_each_kind_applies_behind_reasoning(kind: ConstraintKind, source: str):
    made = compile_constraint(Constraint(kind, source, after=["</think>"]), demo_tokenizer())
    assert accepts(made, "so</think>yes") and not accepts(made, "so</think>perhaps")


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
