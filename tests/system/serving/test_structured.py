"""Structured output of a live server with the demo model: whole answers, by the openai client."""

import asyncio
import json
import re
from enum import StrEnum
from typing import Any, Literal

import pytest
from jsonschema import validate
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow
MODEL = "demo"
CHAT: list[Any] = [{"role": "user", "content": "count to 5"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": -99, "maximum": 99},
        "words": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
        "kind": {"enum": ["a", "b", None]},
    },
    "required": ["n", "words", "kind"],
    "additionalProperties": False,
}
ARITHMETIC = 'root ::= [0-9]{1,2} (("+" | "*") [0-9]{1,2}){1,3}'
# Further fields, and a regex of the answers that follow them.
SPELLINGS = [
    ({"structured_outputs": {"regex": "[a-f]{4}-[0-9]{2}"}}, r"[a-f]{4}-\d\d"),
    ({"structured_outputs": {"choice": ["yes", "no", "perhaps é"]}}, "yes|no|perhaps é"),
    ({"structured_outputs": {"grammar": ARITHMETIC}}, r"\d\d?([+*]\d\d?){1,3}"),
    ({"structured_outputs": {"grammar": 'start: "<" /[a-z]{2}/ ">"'}}, "<[a-z]{2}>"),
    ({"structured_outputs": {"json": {"const": [1, "x"]}}}, r'\[\s*1\s*,\s*"x"\s*\]'),
    ({"structured_outputs": {"json": {"const": [1]}, "disable_any_whitespace": True}}, r"\[1\]"),
    ({"guided_json": {"type": "boolean"}}, "true|false"),
    ({"guided_regex": "(ab){2}"}, "abab"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"guided_grammar": 'root ::= "x" | "y"'}, "x|y"),
    ({"json_schema": '{"type":"null"}'}, "null"),
    ({"regex": "[0-9]{3}"}, r"\d{3}"),
    ({"ebnf": 'root ::= ("0" | "1"){8}'}, "[01]{8}"),
]


class Mood(StrEnum):
    GOOD, BAD = "good", "bad"


class Circle(BaseModel):
    shape: Literal["circle"]
    radius: int = Field(ge=0, le=9)


class Square(BaseModel):
    shape: Literal["square"]
    side: int = Field(ge=0, le=9)


class Report(BaseModel):
    mood: Mood
    count: int = Field(ge=0, le=99)
    note: str | None = Field(max_length=8)
    shapes: list[Circle | Square] = Field(min_length=1, max_length=2)


def json_format(schema: dict[str, Any]) -> Any:
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
async def test_json_schema_answers_are_valid(client: AsyncOpenAI, temperature: float):
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, n=8, temperature=temperature, seed=1, max_tokens=300,
        response_format=json_format(SCHEMA),
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        validate(json.loads(choice.message.content or ""), SCHEMA)


async def test_json_schema_constrains_an_answer_that_the_model_knows(client: AsyncOpenAI):
    properties = {"fruit": {"type": "string"}, "number": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    answer = await client.chat.completions.create(
        model=MODEL, temperature=0.0, response_format=json_format(schema),
        messages=[{"role": "user", "content": "JSON: fruit plum, number 7"}],
    )  # fmt: skip
    assert answer.choices[0].message.content == '{"fruit":"plum","number":7}'


async def test_streamed_json_schema_answer_is_valid(client: AsyncOpenAI):
    stream = await client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=2.0, seed=2, max_tokens=300, stream=True,
        response_format=json_format(SCHEMA),
    )  # fmt: skip
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    validate(json.loads(text), SCHEMA)


async def test_parse_gives_an_object_of_the_class(client: AsyncOpenAI):
    answers = await asyncio.gather(
        *(
            client.chat.completions.parse(
                model=MODEL, messages=CHAT, temperature=2.0, seed=seed, max_tokens=400,
                response_format=Report,
            )
            for seed in range(6)
        )
    )  # fmt: skip
    assert all(isinstance(answer.choices[0].message.parsed, Report) for answer in answers)


async def test_json_object_is_an_object_unless_the_answer_is_cut(client: AsyncOpenAI):
    answer = await client.chat.completions.create(
        model=MODEL, messages=CHAT, n=8, temperature=1.0, seed=3, max_tokens=300,
        response_format={"type": "json_object"},
    )  # fmt: skip
    for choice in answer.choices:
        content = choice.message.content or ""
        assert content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(content), dict)
        else:
            assert choice.finish_reason == "length"


@pytest.mark.parametrize(("fields", "pattern"), SPELLINGS, ids=lambda value: str(value)[:40])
async def test_each_spelling_constrains_both_endpoints(client: AsyncOpenAI, fields, pattern):
    chat = await client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=2.0, n=3, max_tokens=120, extra_body=fields
    )
    completion = await client.completions.create(
        model=MODEL, prompt=["a", "b"], temperature=0.0, max_tokens=120, extra_body=fields
    )
    answers = [each.message.content or "" for each in chat.choices]
    answers += [each.text for each in completion.choices]
    assert [text for text in answers if not re.fullmatch(pattern, text)] == []
    reasons = [each.finish_reason for each in chat.choices]
    assert {*reasons, *(each.finish_reason for each in completion.choices)} == {"stop"}


async def test_hostile_schemas_are_refused_while_others_are_answered(client: AsyncOpenAI):
    hostile: list[dict[str, Any]] = [
        {"enum": [f"{at}-{'x' * at}-{number}" for number in range(12_000)]} for at in range(6)
    ]

    async def ask(schema: dict[str, Any]) -> str:
        answer = await client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=300, response_format=json_format(schema)
        )
        return answer.choices[0].message.content or ""

    attacks = [asyncio.ensure_future(ask(schema)) for schema in hostile]
    plain = await asyncio.gather(*(ask(SCHEMA | {"title": str(at)}) for at in range(4)))
    for text in plain:
        validate(json.loads(text), SCHEMA)
    for outcome in await asyncio.gather(*attacks, return_exceptions=True):
        assert isinstance(outcome, BadRequestError | str)
    with pytest.raises(BadRequestError, match="#/properties/x/not"):
        await ask({"type": "object", "properties": {"x": {"not": {}}}})
