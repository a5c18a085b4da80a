"""Constraints in HTTP bodies: one value for every spelling, and a sentence for every mistake."""

import json
from random import Random
from typing import Any

import pytest
from jsonschema import validate

from gateway.faces.http.dialect.constraints import read_constraint
from gateway.types.constraint import Constraint, ConstraintKind
from protos.generated.worker_pb2 import Prompt
from services.runtime.errors import InvalidArgument
from tests.gateway.gateway_fakes import demo_text, run_harness
from tests.gateway.grammars.walks import demo_index, draw_answer

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAGS = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<"]}
TAG_CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
FORMAT = {
    "type": "triggered_tags",
    "triggers": ["<"],
    "tags": [{"begin": "<a>", "content": TAG_CONTENT, "end": "</a>"}],
}
TAGS_TEXT = json.dumps(FORMAT, separators=(",", ":"))
JSON, REGEX = ConstraintKind.JSON_SCHEMA, ConstraintKind.REGEX
CHOICE, GRAMMAR = ConstraintKind.CHOICE, ConstraintKind.GRAMMAR
TAG = ConstraintKind.STRUCTURAL_TAG
ANY_OBJECT = '{"type":"object"}'


def json_format(**fields: object) -> dict[str, object]:
    return {"response_format": {"type": "json_schema", "json_schema": fields}}


def structured(**fields: object) -> dict[str, object]:
    return {"structured_outputs": fields}


@pytest.mark.parametrize(
    ("fields", "kind", "source", "whitespace", "name"),
    [
        (json_format(name="x", schema=SCHEMA), JSON, TEXT, None,
         "response_format.json_schema.schema"),
        (json_format(name="x", schema=SCHEMA, strict=True, description="d"), JSON, TEXT, None,
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}}, JSON, ANY_OBJECT, None, "response_format"),
        ({"response_format": {"type": "structural_tag", **TAGS}}, TAG, TAGS_TEXT, None,
         "response_format"),
        (structured(json=SCHEMA), JSON, TEXT, None, "structured_outputs.json"),
        (structured(json=TEXT), JSON, TEXT, None, "structured_outputs.json"),
        (structured(regex="a+"), REGEX, "a+", None, "structured_outputs.regex"),
        (structured(choice=["a", "é", "a"]), CHOICE, '["a","é"]', None,
         "structured_outputs.choice"),
        (structured(grammar="root ::= x"), GRAMMAR, "root ::= x", None,
         "structured_outputs.grammar"),
        ({"response_format": {"type": "structural_tag", "format": FORMAT}}, TAG, TAGS_TEXT, None,
         "response_format.format"),
        (structured(structural_tag=json.dumps({"type": "structural_tag", "format": FORMAT})), TAG,
         TAGS_TEXT, None, "structured_outputs.structural_tag.format"),
        (structured(structural_tag=json.dumps(TAGS)), TAG, TAGS_TEXT, None,
         "structured_outputs.structural_tag"),
        (structured(json_object=True, regex=None), JSON, ANY_OBJECT, None,
         "structured_outputs.json_object"),
        (structured(json=SCHEMA, disable_any_whitespace=True), JSON, TEXT, "",
         "structured_outputs.json"),
        (structured(json=SCHEMA, whitespace_pattern=" ?"), JSON, TEXT, " ?",
         "structured_outputs.json"),
        ({"guided_json": SCHEMA}, JSON, TEXT, None, "guided_json"),
        ({"guided_regex": "a"}, REGEX, "a", None, "guided_regex"),
        ({"guided_choice": ["a"]}, CHOICE, '["a"]', None, "guided_choice"),
        ({"guided_grammar": "start: /a/"}, GRAMMAR, "start: /a/", None, "guided_grammar"),
        ({"json_schema": TEXT}, JSON, TEXT, None, "json_schema"),
        ({"regex": "a"}, REGEX, "a", None, "regex"),
        ({"ebnf": "root ::= x"}, GRAMMAR, "root ::= x", None, "ebnf"),
        ({"regex": "a", "response_format": {"type": "text"}}, REGEX, "a", None, "regex"),
    ],
)  # fmt: skip
def test_each_spelling_is_one_value(fields, kind, source, whitespace, name):
    found = read_constraint(fields)
    assert found == Constraint(kind, source, whitespace)
    assert found is not None and found.field_name == name


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        structured(),
        structured(json_object=False),
    ],
)
def test_no_constraint(fields: dict[str, object]):
    assert read_constraint(fields) is None


@pytest.mark.parametrize(
    ("fields", "name", "sentence"),
    [
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "not 'xml'"),
        ({"response_format": {"type": ["text"]}}, "response_format.type", "must be one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        (json_format(name="x"), "response_format.json_schema.schema", "is missing"),
        (json_format(schema=[1]), "response_format.json_schema.schema", "must be a JSON schema"),
        (json_format(schema={}, lax=1), "response_format.json_schema.lax", "remove it"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema",
         "remove it"),
        ({"response_format": {"type": "structural_tag", "format": []}}, "response_format.format",
         "must be an object"),
        ({"response_format": {"type": "structural_tag", "format": FORMAT, "triggers": ["<"]}},
         "response_format.triggers", "remove it"),
        ({"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
         "response_format.structures", "at least"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<"],
                              "structures": [{"begin": "[", "end": ""}]}},
         "response_format.structures[0].begin", "one of the triggers"),
        (structured(json="{"), "structured_outputs.json", "is not valid JSON"),
        (structured(json="[" * 100_000), "structured_outputs.json", "is not valid JSON"),
        (structured(regex=""), "structured_outputs.regex", "not empty"),
        (structured(choice=[]), "structured_outputs.choice", "at least one"),
        (structured(choice=["a", 1]), "structured_outputs.choice", "list of strings"),
        (structured(choice=[str(i) for i in range(10_001)]), "structured_outputs.choice",
         "at most 10000"),
        (structured(regex="a", json={}), "structured_outputs", "json and regex are given"),
        (structured(backend="x"), "structured_outputs.backend", "remove it"),
        (structured(json={}, disable_additional_properties=True),
         "structured_outputs.disable_additional_properties", "additionalProperties"),
        ({"guided_json": {}, "regex": "a"}, "regex", "guided_json constrains the answer, too"),
        ({"response_format": {"type": "json_object"}, **structured(regex="a")},
         "structured_outputs.regex", "response_format constrains the answer, too"),
    ],
)  # fmt: skip
def test_mistake_is_named_with_its_field(fields, name, sentence):
    with pytest.raises(InvalidArgument) as fault:
        read_constraint(fields)
    assert fault.value.field == name and sentence in fault.value.message


# Through a real gateway; the worker draws random tokens that the grammar allows.

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def draw(prompt: Prompt) -> list[int]:
    sampling = prompt.sampling
    answer = draw_answer(sampling.grammar, Random(sampling.seed)) if sampling.grammar else "free"
    return demo_text().encode(answer or "unfinished")


@pytest.mark.parametrize(
    ("fields", "name", "sentence"),
    [
        (json_format(schema={"type": "object", "properties": {"a": {"not": {}}}}),
         "response_format.json_schema.schema", "#/properties/a/not"),
        (structured(regex="("), "structured_outputs.regex", "unclosed group"),
        ({"ebnf": "root ::= nothing"}, "ebnf", "'nothing' not found"),
        ({"guided_json": {"enum": ["x" * 300_000]}}, "guided_json", "at most 262144 bytes"),
    ],
)  # fmt: skip
async def test_constraint_that_cannot_be_enforced_is_a_400(fields, name, sentence):
    async with run_harness(draw) as harness:
        for path, body in (("chat/completions", CHAT), ("completions", {"prompt": "hi"})):
            reply = await harness.http("POST", f"/v1/{path}", {**body, **fields})
            error = reply.json["error"]
            assert (reply.status, error["type"]) == (400, "invalid_request_error")
            assert error["param"] == name and sentence in error["message"]
        assert not harness.worker.prompts


async def test_answers_follow_the_grammar_and_are_forecast_as_one_population() -> None:
    async with run_harness(draw) as harness:
        fields = {**json_format(schema=SCHEMA, name="x"), "n": 4, "max_tokens": 400}
        reply = await harness.http("POST", "/v1/chat/completions", {**CHAT, **fields})
        assert reply.status == 200
        for choice in reply.json["choices"]:
            assert choice["finish_reason"] == "stop"
            validate(json.loads(choice["message"]["content"]), SCHEMA)
        named = {"x-foretoken-application": "mine"}
        prompts = {"prompt": ["a", "b"], "structured_outputs": {"json": TEXT}, "max_tokens": 400}
        reply = await harness.http("POST", "/v1/completions", prompts, named)
        for choice in reply.json["choices"]:
            validate(json.loads(choice["text"]), SCHEMA)
        await harness.http("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
        *constrained, free = [prompt.sampling.grammar for prompt in harness.worker.prompts]
        assert len({*constrained}) == 1 and constrained[0] and not free
        applications = [request.application for request in harness.scheduler.requests]
        assert applications[0].startswith("grammar-")
        assert applications == [applications[0]] * 4 + ["mine"] * 2 + [""]


async def test_scheduler_knows_the_least_tokens_of_an_answer() -> None:
    """The end counts. A stop string or token may end an answer before its grammar does."""
    longest = {"prompt": "a", "max_tokens": 20}
    choice = {"guided_choice": ["perhaps tomorrow", "perhaps"]}
    shortest = demo_index().spell(b"perhaps") + 1
    assert shortest > 2
    asked: list[tuple[dict[str, Any], int]] = [
        (choice, shortest),
        ({**choice, "max_tokens": 2}, 2),
        ({**choice, "stop": ["x"]}, 1),
        ({**choice, "stop_token_ids": [5]}, 1),
        ({**choice, "min_tokens": 15}, shortest),
        ({"min_tokens": 15}, 16),
        ({"min_tokens": 20}, 20),
        ({}, 1),
    ]
    async with run_harness(draw) as harness:
        for fields, _ in asked:
            reply = await harness.http("POST", "/v1/completions", longest | fields)
            assert reply.status == 200
        found = [request.min_tokens for request in harness.scheduler.requests]
        assert found == [least for _, least in asked]


async def test_stream_of_a_constrained_answer() -> None:
    async with run_harness(draw) as harness:
        body = {"prompt": "a", "regex": "[0-9]{3}-[a-z]", "stream": True, "max_tokens": 50}
        reply = await harness.http("POST", "/v1/completions", body)
        text = "".join(event["choices"][0]["text"] for event in reply.events)
        digits, letter = text.split("-")
        assert digits.isdigit() and len(digits) == 3 and letter.isalpha()
