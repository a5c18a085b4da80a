"""The fields that are sent to a server, and what its events mean."""

import json

import pytest

from services.core import FinishReason
from services.worker.backend.dialect import (
    Dialect,
    Event,
    decode_event,
    encode_request,
    find_refusal,
)
from services.worker.requests.types.batch import TokenLogprobs
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams

TEXTS = {1: "one", 2: " two", 3: " three"}
ALWAYS = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "stream": True, "temperature": 1.0}


def decode(ids) -> str:
    return "".join(TEXTS[token] for token in ids)


def find(text: str) -> int | None:
    return next((token for token, known in TEXTS.items() if known == text), None)


def body(**sampling) -> dict:
    prompt = Prompt("r", (1, 2), 2, 9, SamplingParams(**sampling))
    return encode_request(prompt, (1, 2), Dialect(returns_ids=False), "m", decode)


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        ({}, {"seed": 0}),
        ({"seed": 2**31 - 1}, {"seed": 2**31 - 1}),
        ({"seed": 2**31 + 5}, {"seed": 5}),
        ({"temperature": 0.0, "seed": 3}, {"temperature": 0.0}),
        ({"top_p": 0.9, "top_k": 4, "min_p": 0.1}, {"top_p": 0.9, "top_k": 4, "min_p": 0.1}),
        ({"min_tokens": 3, "ignore_eos": True}, {"min_tokens": 3, "ignore_eos": True}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        (
            {"presence_penalty": 0.5, "frequency_penalty": -0.5},
            {"presence_penalty": 0.5, "frequency_penalty": -0.5},
        ),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"stop_token_ids": (3,)}, {"stop_token_ids": [3]}),
        ({"logit_bias": ((2, -1.5),)}, {"logit_bias": {"2": -1.5}}),
        ({"allowed_token_ids": (1, 3)}, {"allowed_token_ids": [1, 3]}),
        ({"bad_tokens": ((1,), (2,), (2, 3))}, {"bad_words": ["one", "two", "two three"]}),
    ],
)
def test_body_has_only_the_fields_that_are_set(sampling: dict, sent: dict) -> None:
    expected = ALWAYS | ({} if sampling.get("temperature") == 0.0 else {"seed": 0}) | sent
    assert body(**sampling) == expected


def test_body_continues_after_the_delivered_tokens() -> None:
    prompt = Prompt("r", (1, 2), 2, 9, SamplingParams(temperature=0.0, min_tokens=4), "", "salt")
    ids = Dialect()
    assert encode_request(prompt, (1, 2, 3, 3, 1), ids, "m", decode) == {
        "model": "m",
        "prompt": [1, 2, 3, 3, 1],
        "max_tokens": 6,
        "min_tokens": 1,
        "temperature": 0.0,
        "stream": True,
        "cache_salt": "salt",
        "return_token_ids": True,
    }
    text = encode_request(prompt, (1, 2, 3), Dialect(False, False), "m", decode)
    assert text["prompt"] == "one two three"
    assert "return_token_ids" not in text


def test_alternatives_are_named_by_id_where_the_server_can() -> None:
    chosen = Prompt("r", (1,), 1, 9, SamplingParams(logprobs=1))
    plain = Prompt("r", (1,), 1, 9, GREEDY)
    names = Dialect(names_ids=True)
    assert encode_request(chosen, (1,), names, "m", decode)["return_tokens_as_token_ids"] is True
    for prompt, dialect in ((plain, names), (chosen, Dialect())):
        assert "return_tokens_as_token_ids" not in encode_request(
            prompt, (1,), dialect, "m", decode
        )


def test_refuses_what_no_answer_of_the_server_could_have() -> None:
    scored = Prompt("r", (1,), 1, 9, SamplingParams(prompt_logprobs=1))
    chosen = Prompt("r", (1,), 1, 9, SamplingParams(logprobs=1))
    assert "prompt_logprobs" in find_refusal(scored, Dialect())
    assert "logprobs" in find_refusal(chosen, Dialect(returns_ids=False))
    assert find_refusal(chosen, Dialect()) == ""
    assert find_refusal(Prompt("r", (1,), 1, 9, GREEDY), Dialect(False, False)) == ""


def choice(**fields) -> bytes:
    return json.dumps({"choices": [{"index": 0, **fields}]}).encode()


@pytest.mark.parametrize(
    ("data", "event"),
    [
        (choice(text="a", token_ids=[7, 8]), Event("a", (7, 8))),
        (choice(text="a", token_ids=None), Event("a")),
        (choice(text="", finish_reason="stop"), Event(ended=True, reason=FinishReason.STOP)),
        (choice(text="a", finish_reason="length"), Event("a", None, (), True, FinishReason.LENGTH)),
        (choice(text="", finish_reason="abort"), Event(ended=True)),
        (b'{"choices": [], "usage": {"prompt_tokens": 3}}', None),
        (
            choice(
                token_ids=[1],
                logprobs={
                    "token_logprobs": [-0.5],
                    "top_logprobs": [
                        {" two": -2.0, "token_id:9": -0.5, "unknown": -3.0, "token_id:²": -4.0}
                    ],
                },
            ),
            Event("", (1,), (TokenLogprobs(-0.5, (9, 2), (-0.5, -2.0)),)),
        ),
    ],
)
def test_events_of_servers(data: bytes, event: Event | None) -> None:
    assert decode_event(data, find) == event


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"{", "an event of the backend is not JSON"),
        (b"[]", "an event of the backend is not in OpenAI's format"),
        (b'{"choices": [7]}', "an event of the backend is not in OpenAI's format"),
        (choice(token_ids=[-1]), "an event of the backend is not in OpenAI's format"),
        (choice(token_ids=[2**32]), "an event of the backend is not in OpenAI's format"),
        (choice(token_ids=[float("inf")]), "an event of the backend is not in OpenAI's format"),
        (choice(text=5), "an event of the backend is not in OpenAI's format"),
        (
            choice(logprobs={"token_logprobs": [10**400]}),
            "an event of the backend is not in OpenAI's format",
        ),
        (
            choice(
                logprobs={"token_logprobs": [0], "top_logprobs": [{f"token_id:{2**32}": 0}]},
            ),
            "an event of the backend is not in OpenAI's format",
        ),
        (b"[" * 100_000, "an event of the backend is not JSON"),
        (b'{"error": "half \\ud800"}', "half \\?"),
        (choice(token_ids=["x"]), "an event of the backend is not in OpenAI's format"),
        (b'{"error": {"message": "out of memory"}}', "out of memory"),
        (b'{"error": "broken"}', "broken"),
    ],
)
def test_what_is_no_event_is_one_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        decode_event(data, find)
