"""What constraints accept and refuse once compiled, and the sentences of those that cannot be."""

import json

import pytest

from gateway.grammars.faults import GrammarFault
from gateway.types.constraint import JSON_OBJECT, ConstraintKind
from tests.gateway.grammars.walks import accepts, compile_text

SCHEMA, REGEX = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX
CHOICE, GRAMMAR = ConstraintKind.CHOICE, ConstraintKind.GRAMMAR

PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["age"],
    "additionalProperties": False,
}
LIST = {  # a linked list
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}},
                       "additionalProperties": False}},
    "$ref": "#/$defs/node",
}  # fmt: skip
TAGGED = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, kind: {"type": "integer"}},
         "required": ["kind", kind], "additionalProperties": False}
        for kind in ("cat", "dog")
    ],
    "discriminator": {"propertyName": "kind"},  # pydantic writes it
}  # fmt: skip
ARITHMETIC = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'
# Constraint, texts that follow it, texts that do not.
ANSWERS = [
    (SCHEMA, JSON_OBJECT, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a":}']),
    (SCHEMA, PERSON, ['{"age":1}', '{"age": 1, "name": "é\\n"}', '{\n  "age": 1\n}'],
     ['{"name":"x"}', '{"age":1,"b":2}', '{"age":1.5}', ' {"age":1}', '{"age":1} ']),
    (SCHEMA, PERSON, ['{"age":%s1}' % (" " * 20)], ['{"age":%s1}' % (" " * 21)]),
    (SCHEMA, PERSON, ['{"age":1,"name":"x"}'], ['{"name":"x","age":1}']),  # the schema's order
    (SCHEMA, LIST, ["{}", '{"next":{"next":{}}}'], ['{"last":{}}', "null"]),
    (SCHEMA, TAGGED, ['{"kind":"cat","cat":1}', '{"kind":"dog","dog":2}'],
     ['{"kind":"cat","dog":2}']),
    (SCHEMA, {"type": "object", "patternProperties": {"^a": {"type": "integer"}},
              "additionalProperties": False}, ['{"ab":1}', "{}"], ['{"b":1}', '{"ab":"x"}']),
    (SCHEMA, {"type": "string", "format": "date"}, ['"2026-11-26"', '"2000-02-29"'],
     ['"2026-13-26"', '"today"', '"2026-02-29"', '"1900-02-29"', '"0000-01-01"']),
    (SCHEMA, {"type": "string", "format": "date-time", "pattern": "^2"},
     ['"2026-11-26T23:59:59.5+01:00"'],
     ['"2026-11-26T23:59:60Z"', '"1999-11-26T00:00:00Z"', '"2026-11-26"']),
    (SCHEMA, {"properties": {"a": {"type": "null"}}, "patternProperties": {"^x": {"type": "null"}}},
     ['{"a":null,"b":1}'], [r'{"\u0061":1}', r'{"\u0078":1}']),  # an escape names it, too
    (SCHEMA, {"type": "object", "minProperties": 2, "required": ["a"]}, ['{"a":1,"b":2}'],
     ['{"a":1}', '{"a":1,"a":2}']),
    (SCHEMA, {"type": "string", "minLength": 2.0}, ['"ab"'], ['"a"']),
    (SCHEMA, {"$ref": "#/shared/x", "shared": {"x": {"type": "string", "format": "time"}}},
     ['"10:00:00Z"'], ['"10:00:60Z"']),
    # ECMA-262's regular expressions
    (SCHEMA, {"type": "string", "pattern": "^a.$"}, ['"ab"', r'"a\t"'],
     [r'"a\r"', r'"a\n"', '"a\u2028"']),
    (SCHEMA, {"type": "string", "pattern": r"^\S\s$"}, ['"a "'], ['"\ufeff "', '"ab"']),
    (SCHEMA, {"type": "string", "pattern": "^[a[b&&c]$"}, ['"["', '"&"', '"c"'], ['"d"', '"b]"']),
    (SCHEMA, {"type": "string", "pattern": "^[^[]]$"}, ['"a]"'], ['"[]"', '"a"']),
    (SCHEMA, {"type": "string", "pattern": r"^[+--\s][\S]$"}, ['"+a"', '",b"', '" c"'], ['".a"']),
    (SCHEMA, {"type": "string", "pattern": "^a", "maxLength": 3}, ['"abc"'], ['"abcd"', '"b"']),
    (SCHEMA, {"type": "integer", "multipleOf": 3, "minimum": 4}, ["6", "300"], ["3", "7"]),
    (SCHEMA, {"type": "number", "exclusiveMinimum": 1}, ["1.5"], ["1", "0.5"]),
    (SCHEMA, {"type": "integer", "minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),  # draft 4
    (SCHEMA, {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
     ["[1,2]", "[1, 2, 3]"], ["[1]", "[1,2,3,4]"]),
    (SCHEMA, {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
     ['["a"]'], ['["a",1]']),  # draft 7
    (SCHEMA, {"enum": ["a", 1, None, {"b": [2]}]}, ['"a"', "1", "null", '{"b":[2]}'], ['"b"', "2"]),
    (SCHEMA, {"type": "array", "uniqueItems": False}, ["[1,1]"], ["1"]),
    (SCHEMA, {"properties": {"uniqueItems": {"const": False}}, "required": ["uniqueItems"],
              "type": "object"}, ['{"uniqueItems":false}'], ["{}"]),
    (SCHEMA, True, ["1", "{}"], ["a"]),
    (REGEX, r"[a-z]{3}", ["abc"], ["ab", "abcd"]),
    (REGEX, r"^a/b\n$", ["a/b\n"], ["a/b"]),
    (CHOICE, ["ab", "abc", 'é"\n', "😀", r"\d"], ["ab", "abc", 'é"\n', "😀", r"\d"], ["a", "1"]),
    (GRAMMAR, ARITHMETIC, ["1+(2+3)", "7"], ["1+", "()"]),
    (GRAMMAR, r'root ::= "\u00e9" [\u4e00-\u9fff] "\\u0041" "\u0022"', ['é中\\u0041"'], ["é"]),
    (GRAMMAR, 'start: "yes" | "no" /[0-9]+/', ["yes", "no12"], ["no"]),
    (GRAMMAR, '?start: NUMBER "+" NUMBER\nNUMBER: /[0-9]+/\n%ignore " "', ["1 + 2"], ["1+"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "right", "wrong"), ANSWERS)
def test_compiled_constraint_accepts_exactly_what_follows_it(kind, source, right, wrong):
    grammar = compile_text(kind, source if isinstance(source, str) else json.dumps(source))
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("whitespace", "right", "wrong"),
    [
        ("", ['{"age":1,"name":"x"}'], ['{"age": 1}']),
        (" ", ['{"age": 1, "name": "x"}', '{"age":1}'], ['{"age":  1}', '{"age":\n1}']),
    ],
)
def test_whitespace_of_json_can_be_chosen(whitespace: str, right: list[str], wrong: list[str]):
    grammar = compile_text(SCHEMA, json.dumps(PERSON), whitespace)
    assert all(accepts(grammar, text) for text in right)
    assert not any(accepts(grammar, text) for text in wrong)


def in_a(schema: object) -> dict[str, object]:
    return {"type": "object", "properties": {"a/b": schema}}


# What cannot be enforced is refused by name and place, never ignored.
FAULTS = [
    (SCHEMA, in_a({"not": {}}), '"not"', "#/properties/a~1b/not"),
    (SCHEMA, {"if": {}, "then": {}}, '"if", "then"', "#/if"),
    (SCHEMA, in_a({"type": "array", "uniqueItems": True}), "uniqueItems", "a~1b/uniqueItems"),
    (SCHEMA, {"anyOf": [{}, {"contains": {}}]}, "contains", "#/anyOf/1/contains"),
    (SCHEMA, {"$defs": {"x": {"propertyNames": {}}}, "$ref": "#/$defs/x"}, "propertyNames",
     "#/$defs/x/propertyNames"),
    (SCHEMA, {"dependentRequired": {"a": ["b"]}}, "dependentRequired", "#/dependentRequired"),
    (SCHEMA, {"dependentSchemas": {}}, "dependentSchemas", "#/dependentSchemas"),
    (SCHEMA, {"unevaluatedProperties": False}, "unevaluatedProperties", "#/unevaluated"),
    (SCHEMA, {"unevaluatedItems": False, "type": "array"}, "unevaluatedItems", "#/unevaluated"),
    (SCHEMA, {"$dynamicRef": "#x"}, "$dynamicRef", "#/$dynamicRef"),
    (SCHEMA, in_a({"type": "string", "format": "credit-card"}), "credit-card", "a~1b/format"),
    (SCHEMA, in_a({"type": "text"}), "Invalid type: text", "a~1b/type"),
    (SCHEMA, in_a({"type": "string", "pattern": "(?=a)b"}), "look-ahead", "a~1b/pattern"),
    (SCHEMA, in_a({"type": "string", "pattern": r"\Aa"}), "\\A in a pattern", "#/properties/a~1b"),
    (SCHEMA, in_a({"patternProperties": {"[]": {}}}), "class []", "#/properties/a~1b"),
    (SCHEMA, {"type": "string", "pattern": "(?s)."}, "(?s)", "#"),
    (SCHEMA, in_a({"type": "object", "minProperties": 2}), "minProperties may exceed", "a~1b"),
    (SCHEMA, {"$ref": "#/shared/x", "shared": {"x": {"minProperties": 2}}}, "minProperties",
     "#/shared/x"),
    (SCHEMA, in_a({"type": "integer", "multipleOf": 0.123456789}), "digits", "a~1b/multipleOf"),
    (SCHEMA, {"$ref": "#/$defs/none"}, "does not exist", "#/$ref"),
    (SCHEMA, {"$ref": "https://example.org/x.json"}, "does not fetch", "#/$ref"),
    (SCHEMA, {"$ref": "#"}, "no answer can follow it", ""),
    (SCHEMA, {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf", "#/oneOf"),
    (SCHEMA, {"type": "object", "patternProperties": {"^a": {}, "b$": {"type": "null"}}},
     "not disjoint", "#/patternProperties"),
    (SCHEMA, {"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)", ""),
    (SCHEMA, {"type": "string", "maxLength": 10**12}, "1000000000000", ""),
    (SCHEMA, {"type": "integer", "multipleOf": 10**9 + 7}, "fuel exhausted", ""),
    (SCHEMA, {"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types", ""),
    (SCHEMA, {"type": "string", "format": "none", "x-guidance": {"lenient": True}}, "none", ""),
    (SCHEMA, False, "Unsatisfiable", ""),
    (SCHEMA, {"properties": []}, "properties", ""),
    (REGEX, "(", "unclosed group", ""),
    (REGEX, r"a\b", "lookaround", ""),
    (GRAMMAR, "root ::= missing", "missing", ""),
    (GRAMMAR, "start: missing", "missing", ""),
    (GRAMMAR, "not a grammar", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "reason", "place"), FAULTS)
def test_constraint_that_cannot_be_enforced_is_refused_with_its_place(kind, source, reason, place):
    with pytest.raises(GrammarFault) as fault:
        compile_text(kind, source if isinstance(source, str) else json.dumps(source))
    assert reason in str(fault.value) and place in str(fault.value)
    assert len(str(fault.value)) < 700 and "\n" not in str(fault.value)


# Large counts need no large grammar.
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        {"type": "string", "minLength": 10**6},
        {"type": "string", "maxLength": 10**6},
        {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 10**6},
        {"type": "string", "pattern": "(a?){200}(a{1,200}){200}"},
    ],
)
def test_large_counts_compile(schema: dict[str, object]):
    assert compile_text(SCHEMA, json.dumps(schema))
