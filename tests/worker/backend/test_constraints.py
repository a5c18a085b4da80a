"""Constraints in the fields of each style of server, refusals, and how a style is found."""

import json
import re
from typing import Any

import pytest

from foretoken.running.options import demo_model
from services.worker.backend.client import BackendClient
from services.worker.backend.config import BackendConfig
from services.worker.backend.constraints import ONLY_ANSWER, STYLES, find_restart
from services.worker.backend.dialect import Dialect, encode_request, find_refusal
from services.worker.backend.discovery import discover
from services.worker.folder import load_tokenizer
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams, SourceText
from tests.foretoken.bench.openai_fake import (
    ReceivedRequest,
    ScriptedAnswer,
    error_answer,
    event,
    fake_server,
    model_list,
)

VLLM, OLDER, SGLANG, LLAMA = (style.name for style in STYLES)
SCHEMA = {"type": "null"}
JSON = SourceText("json_schema", json.dumps(SCHEMA))
REGEX, GRAMMAR = SourceText("regex", "a+"), SourceText("grammar", 'root ::= "a"')
CHOICE = SourceText("choice", json.dumps(["a.b", 'c"d']))
TAG = SourceText("structural_tag", "{}")


def constrained(source: SourceText | None, **sampling: Any) -> Prompt:
    given = SamplingParams(temperature=0.0, grammar="{}", source=source, **sampling)
    return Prompt("r", (1,), 1, 9, given)


def sent(prompt: Prompt, style: str) -> dict[str, Any]:
    """The fields that a free answer does not have."""
    dialect = Dialect(constraints=style)
    free = encode_request(Prompt("r", (1,), 1, 9, GREEDY), (1,), dialect, "m", str)
    body = encode_request(prompt, (1,), dialect, "m", str)
    return {name: value for name, value in body.items() if name not in free}


@pytest.mark.parametrize(
    ("style", "source", "fields"),
    [
        (VLLM, JSON, {"structured_outputs": {"json": SCHEMA}}),
        (VLLM, JSON._replace(whitespace=""),
         {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}),
        (VLLM, JSON._replace(whitespace=" ?"),
         {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}),
        (VLLM, CHOICE, {"structured_outputs": {"choice": ["a.b", 'c"d']}}),
        (VLLM, TAG, {"structured_outputs": {"structural_tag": "{}"}}),
        (OLDER, JSON, {"guided_json": SCHEMA}),
        (OLDER, REGEX, {"guided_regex": "a+"}),
        (OLDER, GRAMMAR, {"guided_grammar": 'root ::= "a"'}),
        (SGLANG, JSON, {"json_schema": json.dumps(SCHEMA)}),
        (SGLANG, REGEX, {"regex": "a+"}),
        (SGLANG, GRAMMAR, {"ebnf": 'root ::= "a"'}),
        (LLAMA, JSON, {"json_schema": SCHEMA}),
        (LLAMA, GRAMMAR, {"grammar": 'root ::= "a"'}),
        (LLAMA, CHOICE, {"grammar": 'root ::= "a.b" | "c\\"d"'}),
    ],
)  # fmt: skip
def test_constraint_is_told_in_the_fields_of_the_server(style, source, fields) -> None:
    prompt = constrained(source, min_tokens=5, ignore_eos=True)
    assert find_refusal(prompt, Dialect(constraints=style)) == ""
    assert sent(prompt, style) == fields


def test_choices_of_a_regex_are_exactly_these() -> None:
    pattern = sent(constrained(CHOICE), SGLANG)["regex"]
    assert [text for text in ("a.b", 'c"d', "axb", "") if re.fullmatch(pattern, text)] == [
        "a.b",
        'c"d',
    ]


@pytest.mark.parametrize(
    ("style", "source", "sentence"),
    [
        ("", JSON, "the backend cannot make answers follow a schema or grammar"),
        (VLLM, None, "no constraint for calls of tools"),
        (VLLM, JSON._replace(behind_reasoning=True), "this answer begins with reasoning"),
        (OLDER, TAG, "cannot make answers follow a structural tag; its fields are guided_*"),
        (LLAMA, REGEX, "cannot make answers follow a regex; its fields are json_schema, grammar"),
    ],
)
def test_constraint_that_a_server_does_not_have_is_refused(style, source, sentence) -> None:
    assert sentence in find_refusal(constrained(source), Dialect(constraints=style))
    assert find_refusal(Prompt("r", (1,), 1, 9, GREEDY), Dialect(constraints=style)) == ""


def test_constraint_behind_reasoning_is_sent_as_any_other() -> None:
    """The server applies it behind the end of the reasoning, here token 7."""
    prompt = constrained(JSON._replace(behind_reasoning=True))
    assert find_refusal(prompt, Dialect(constraints=VLLM, reasoning_end=(7,))) == ""
    assert sent(prompt, VLLM) == {"structured_outputs": {"json": SCHEMA}}


@pytest.mark.parametrize(
    ("tokens", "behind", "restart"),
    [
        ([1, 7, 8, 2, 3], True, 2),  # the mark in the prompt does not count
        ([1, 2, 3, 7, 8], True, 5),
        ([1, 2, 7, 8, 3], True, 4),
        ([1, 2, 7, 8, 7, 8], True, 4),
        ([1, 2, 3, 7], True, 2),
        ([1, 2], True, 2),
        ([1, 2, 7, 8, 3], False, 2),
    ],
)
def test_restarted_answer_begins_behind_its_reasoning(tokens, behind: bool, restart: int) -> None:
    sampling = constrained(JSON._replace(behind_reasoning=behind)).sampling
    assert find_restart(tokens, 2, sampling, (7, 8)) == restart
    assert find_restart(tokens, 2, sampling, ()) == 2


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("style", [*STYLES, None], ids=lambda style: style.name if style else "")
async def test_style_is_the_one_that_has_an_effect(style, status: int, reasons: bool) -> None:
    """A server ignores the fields that it does not know, refuses them, or fails. One with a
    reasoning parser applies them to prompts that end the reasoning."""
    probes = {name for each in STYLES for name in each.probe}
    tokenizer = load_tokenizer(demo_model())
    tokenizer.add_special_tokens(["</think>"])
    end = (tokenizer.token_to_id("</think>"),)

    def answer(request: ReceivedRequest) -> ScriptedAnswer:
        if request.path != "/v1/completions":
            return error_answer(404, "no such page")
        given = {name: value for name, value in request.body.items() if name in probes}
        ended = not reasons or str(request.body["prompt"]).endswith("</think>")
        obeyed = style is not None and given == style.probe and ended
        if status != 200 and given and not obeyed:
            return error_answer(status, "no such field")
        return ScriptedAnswer([event(choices=[{"text": ONLY_ANSWER[:1] if obeyed else "3"}])])

    async with (
        fake_server(answer, model_list("m")) as server,
        BackendClient(server.url, BackendConfig()) as client,
    ):
        found = await discover(client, tokenizer, "", "m")
    assert found.dialect.constraints == (style.name if style else "")
    assert found.dialect.reasoning_end == (end if style and reasons else ())
