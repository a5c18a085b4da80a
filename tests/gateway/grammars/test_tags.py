"""Structural tags in XGrammar's formats: texts they accept, and what is refused with its place."""

import json

import pytest

from gateway.grammars.faults import GrammarFault
from gateway.types.constraint import ConstraintKind
from tests.gateway.grammars.walks import accepts, compile_text

INT = {"type": "json_schema", "json_schema": {"type": "integer"}}
BOOL = {"type": "json_schema", "json_schema": {"type": "boolean"}}
ANY = {"type": "any_text"}
END = {"type": "const_string", "value": "</t>"}


def tag(begin: object, content: object, end: object) -> dict[str, object]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


TAGS = [tag("<f=a>", INT, "</f>"), tag("<f=b>", BOOL, "</f>")]
A, B = "<f=a>1</f>", "<f=b>true</f>"
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f"], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": ","}
LIST = {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}}

# Format, texts that follow it, texts that do not. XGrammar's matcher agrees, except where noted.
ANSWERS = [
    (END, ["</t>"], ["", "</t>x"]),
    ({"type": "const_string", "value": ""}, [""], ["a"]),
    ({"type": "json_schema", "json_schema": True}, ["1", "{}"], ["a"]),
    ({**LIST, "max_whitespace_cnt": 2}, ["[1,  2]"], ["[1,   2]"]),
    ({**LIST, "max_whitespace_cnt": 0}, ["[1,2]"], ["[1, 2]"]),  # XGrammar refuses 0
    (ANY, ["", "x\ny"], []),
    ({"type": "any_text", "excludes": ["no", "x/"]}, ["a n o x"], ["a no b", "ax/"]),
    ({"type": "any_text", "max_chars": 3}, ["abc", "é中b"], ["abcd"]),
    ({"type": "regex", "pattern": "a/b|c"}, ["a/b", "c"], ["a"]),
    ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["aab"], ["aa"]),
    ({"type": "sequence", "elements": [END, INT, END]}, ["</t>12</t>"], ["</t>12", "</t></t>"]),
    # XGrammar lets the text go on behind its end.
    ({"type": "sequence", "elements": [ANY, END, INT]}, ["x</t>1"], ["x1", "</t></t>2"]),
    ({"type": "or", "elements": [INT, END, {"type": "regex", "pattern": "y+"}]},
     ["1", "</t>", "yy"], ["1y", "z"]),
    ({"type": "or", "elements": [{"type": "regex", "pattern": r"\{x"}, BOOL, LIST]},
     ["{x", "true", "[]"], ["{y"]),
    (tag("<t>", ANY, "</t>"), ["<t>x</t>", "<t></t>"], ["<t>x", "<t>x</t>y", "<t></t></t>"]),
    (tag("<t>", ANY, ["</t>", "</b>"]), ["<t>x</t>", "<t>y</b>"], ["<t>x</t></b>"]),
    (tag("<t>", INT, ["</t>", "</b>"]), ["<t>1</t>", "<t>1</b>"], ["<t>x</t>"]),
    (TRIGGERED, ["", "hi", A, f"x{B}y{A}"], ["<f=a>x</f>", "<f", "<f=a>1"]),
    ({**TRIGGERED, "at_least_one": True}, [A, f"{A}x{B}"], ["", "x", f"x{A}"]),
    ({**TRIGGERED, "stop_after_first": True}, ["", "x", f"x{A}"], [f"{A}x"]),
    ({**TRIGGERED, "stop_after_first": True, "at_least_one": True}, [A], [f"{A}x", ""]),
    ({**TRIGGERED, "excludes": ["bad"]}, [f"ok{A}"], ["bad", f"bad{A}", f"{A}bad"]),
    (tag("<t>", TRIGGERED, "</t>"), ["<t>x</t>", f"<t>a{A}b</t>"],
     ["<t>x</t>y", "<t><f=a>x</f></t>"]),
    (SEPARATED, ["", A, f"{A},{B}"], [f"{A},", "x"]),
    ({**SEPARATED, "at_least_one": True}, [A], [""]),
    ({**SEPARATED, "stop_after_first": True}, ["", A], [f"{A},{B}"]),
    ({**SEPARATED, "separator": ""}, [A + B], ["x"]),
    ({"type": "optional", "content": INT}, ["", "1"], ["x"]),
    ({"type": "plus", "content": END}, ["</t>", "</t></t>"], ["", "<"]),
    ({"type": "star", "content": END}, ["", "</t></t>"], ["<"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": END}, ["</t>"], ["", "</t></t></t>"]),
    ({"type": "repeat", "min": 1, "max": -1, "content": END}, ["</t></t></t>"], [""]),
    ({"type": "dispatch", "rules": [["<n>", INT], ["<b>", BOOL]]},
     ["", "x<n>1y<b>true"], ["<n>x", "<b>"]),
    ({"type": "dispatch", "rules": [["<n>", tag("", INT, ";")]], "loop": False},
     ["x", "x<n>1;"], ["<n>1;x"]),
    ({"type": "sequence", "elements": [{"type": "dispatch", "excludes": ["</t>"],
                                        "rules": [["<n>", tag("", INT, ";")]]}, END, INT]},
     ["a<n>1;b</t>2", "</t>2"], ["a</t>b</t>2"]),
    ({"type": "token_triggered_tags", "trigger_tokens": ["<|user|>"],
      "tags": [tag({"type": "token", "token": "<|user|>"}, INT, "x")]}, ["", "a"], []),
]  # fmt: skip

FAULTS = [
    ({"type": "exclude_token"}, "type: input tag 'exclude_token'"),
    ({}, "type: unable to extract tag using discriminator 'type'"),
    ({"type": "sequence", "elements": [END, {**INT, "style": "qwen_xml"}]},
     "elements[1].style: is not supported"),
    ({"type": "or", "elements": [{**INT, "any_order": True}]}, "elements[0].any_order"),
    (tag("a", {"type": "any_text", "max_tokens": 5}, "b"), "content.max_tokens: is not supported"),
    ({**TRIGGERED, "tags": [tag("<f=a>", {**INT, "json_schema": 1}, "")]},
     "tags[0].content.json_schema."),
    ({**TRIGGERED, "lazy": True}, "lazy: extra inputs are not permitted"),
    ({**TRIGGERED, "triggers": ["<g"]}, "begin '<f=a>' starts with none of the triggers"),
    ({"type": "sequence", "elements": [ANY, INT]}, "text without an end must be the last one"),
    ({"type": "plus", "content": ANY}, "cannot be repeated"),
    ({"type": "repeat", "min": 3, "max": 2, "content": END}, "max 2 must be at least min 3"),
    ({"type": "repeat", "min": 1, "max": 10**9, "content": END}, "max: input should be less than"),
    ({"type": "token", "token": "user"}, "'user' is not a special token"),
    ({"type": "token", "token": 10**9}, "'1000000000' is not a special token"),
    ({"type": "regex", "pattern": "("}, "unclosed group"),
    ({"type": "json_schema", "json_schema": {"not": {}}}, '"not"'),
    ({"type": "const_string", "value": 1}, "value: input should be a valid string"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "right", "wrong"), ANSWERS)
def test_format_accepts_exactly_what_follows_it(given, right, wrong):
    grammar = compile_text(ConstraintKind.STRUCTURAL_TAG, json.dumps(given))
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(("given", "reason"), FAULTS)
def test_format_that_cannot_be_enforced_is_refused_with_its_place(given, reason):
    with pytest.raises(GrammarFault) as fault:
        compile_text(ConstraintKind.STRUCTURAL_TAG, json.dumps(given))
    assert reason in str(fault.value)
