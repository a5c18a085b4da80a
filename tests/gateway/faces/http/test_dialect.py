"""vLLM's fields over HTTP: their effect on the worker's input and on the answer's format."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from protos.generated import common_pb2 as common
from tests.gateway.gateway_fakes import Harness, Reply, demo_text, run_harness, tokens_of

ANSWER = tokens_of("12é")  # four tokens
END = demo_text().encode("<|end|>")[0]
CHAT = [{"role": "user", "content": "1,"}]


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: ANSWER) as running:
        yield running


async def complete(harness: Harness, **fields: Any) -> Reply:
    return await harness.http("POST", "/v1/completions", {"prompt": "1,", "seed": 1, **fields})


async def chat(harness: Harness, **fields: Any) -> Reply:
    return await harness.http("POST", "/v1/chat/completions", {"messages": CHAT, **fields})


async def test_sampling_fields_reach_the_worker(harness: Harness) -> None:
    word = demo_text().encode("apple")
    fields = {
        "stop_token_ids": [7, 5, 7], "logit_bias": {"3": -100, "40": 2.5}, "priority": -3,
        "allowed_token_ids": [40, 41, 40], "bad_words": ["apple", " apple"], "prompt_logprobs": 2,
    }  # fmt: skip
    for ask in (complete, chat):
        assert (await ask(harness, **fields)).status == 200
        sampling = harness.worker.prompts[-1].sampling
        assert sorted(sampling.stop_token_ids) == [5, 7]
        assert dict(sampling.logit_bias) == {3: -100, 40: 2.5}
        assert list(sampling.allowed_token_ids) == [40, 41]
        spaced = demo_text().encode(" apple")
        assert [list(ids.ids) for ids in sampling.bad_tokens] == [word, spaced] * 2
        assert sampling.prompt_logprobs == 2
        assert harness.scheduler.requests[-1].priority == -3
    assert (await complete(harness)).status == 200
    plain = harness.worker.prompts[-1].sampling
    assert not plain.HasField("prompt_logprobs")
    assert not (plain.stop_token_ids or plain.logit_bias or plain.allowed_token_ids)
    assert not plain.bad_tokens


async def test_answer_has_the_client_s_request_id_even_if_repeated(
    harness: Harness,
) -> None:
    replies = await asyncio.gather(*(chat(harness, request_id="again") for _ in range(3)))
    streamed = await complete(harness, request_id="again", stream=True, n=2)
    assert {reply.json["id"] for reply in replies} == {"chatcmpl-again"}
    assert {event["id"] for event in streamed.events} == {"cmpl-again"}
    wire = [request.request_id for request in harness.scheduler.requests]
    assert len({*wire}) == 5
    assert all(name.startswith("again.") for name in wire)


async def test_token_ids_are_returned_as_in_vllm(harness: Harness) -> None:
    whole = (await complete(harness, return_token_ids=True, n=2)).json
    prompt = demo_text().encode("1,")
    for choice in whole["choices"]:
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, ANSWER)
    talk = (await chat(harness, return_token_ids=True)).json
    prompt_ids = demo_text().encode_chat(CHAT)
    assert (talk["prompt_token_ids"], talk["choices"][0]["token_ids"]) == (prompt_ids, ANSWER)
    events = (await complete(harness, return_token_ids=True, stream=True)).events
    choices = [event["choices"][0] for event in events]
    assert [choice.get("prompt_token_ids") for choice in choices] == [
        prompt, *[None] * (len(choices) - 1),
    ]  # fmt: skip
    assert [token for choice in choices for token in choice["token_ids"]] == ANSWER
    events = (await chat(harness, return_token_ids=True, stream=True)).events
    assert [event.get("prompt_token_ids") for event in events] == [
        prompt_ids, *[None] * (len(events) - 1),
    ]  # fmt: skip
    assert [t for event in events for t in event["choices"][0]["token_ids"]] == ANSWER
    plain = (await complete(harness)).json
    assert "token_ids" not in plain["choices"][0]


async def test_continuous_usage_is_sent_with_each_chunk(harness: Harness) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await complete(harness, stream=True, stream_options=options, n=2)).events
    *parts, end = events
    for index in (0, 1):
        own = [e["usage"] for e in parts if e["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in own]
        assert counts == sorted(counts) and counts[-1] == 4
        assert all(u["prompt_tokens"] == 2 for u in own)
        assert all(u["total_tokens"] == 2 + u["completion_tokens"] for u in own)
    assert (end["choices"], end["usage"]["completion_tokens"]) == ([], 8)
    options = {"continuous_usage_stats": True}  # without include_usage it has no effect, as in vLLM
    events = (await complete(harness, stream=True, stream_options=options)).events
    assert not any("usage" in event for event in events)


async def test_usage_reports_cached_tokens(harness: Harness) -> None:
    harness.worker.cached_tokens = 2
    content = (await complete(harness, prompt=["1,", "1,2"], n=2)).json["usage"]
    assert content == {
        "prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip


async def test_prompt_is_scored_without_an_answer(harness: Harness) -> None:
    """The request of lm-eval."""
    prompts = [demo_text().encode("apple fig,"), demo_text().encode("1 2")]
    reply = await complete(harness, prompt=prompts, echo=True, logprobs=1, max_tokens=0)
    for choice, ids in zip(reply.json["choices"], prompts, strict=True):
        texts = [demo_text().token_text(token) for token in ids]
        columns = choice["logprobs"]
        assert choice["text"] == "".join(texts)
        assert choice["finish_reason"] == "length"
        assert columns["tokens"] == texts
        assert columns["token_logprobs"] == [None, *(-at for at in range(1, len(ids)))]
        assert columns["top_logprobs"] == [
            None, *({text: -at} for at, text in enumerate(texts[1:], 1)),
        ]  # fmt: skip
        offsets = [len("".join(texts[:at])) for at in range(len(ids))]
        assert columns["text_offset"] == offsets
    assert reply.json["usage"]["completion_tokens"] == 0
    assert [prompt.max_tokens for prompt in harness.worker.prompts] == [1, 1]


async def test_answer_scores_follow_prompt_scores(harness: Harness) -> None:
    """The request of older lm-eval versions, which drop the last score."""
    whole = (await complete(harness, echo=True, logprobs=2, max_tokens=3, prompt="1é,")).json
    [choice] = whole["choices"]
    prompt = demo_text().encode("1é,")
    columns = choice["logprobs"]
    assert choice["text"].startswith("1é,12")
    assert columns["token_logprobs"] == [None, -1, -2, -3, -0.25, -0.25, -0.25]
    assert columns["text_offset"] == [0, 1, 1, 2, 3, 4, 5]
    assert len(columns["tokens"]) == len(prompt) + 3
    assert all(len(top) >= 1 for top in columns["top_logprobs"][1:])
    fields = {"echo": True, "logprobs": 2, "max_tokens": 3, "prompt": "1é,"}
    events = (await complete(harness, stream=True, **fields)).events
    pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        rows = [row for piece in pieces for row in piece["logprobs"][name]]
        assert rows == columns[name]


async def test_echo_prepends_the_prompt_to_each_answer(harness: Harness) -> None:
    for prompts, texts in (
        (["1,", "2<|end|>"], ["1,12é", "1,12é", "2<|end|>12é", "2<|end|>12é"]),
        ([END, *tokens_of("7")], ["<|end|>712é", "<|end|>712é"]),
    ):
        whole = (await complete(harness, prompt=prompts, n=2, echo=True)).json
        assert [choice["text"] for choice in whole["choices"]] == texts
    assert not harness.worker.prompts[-1].sampling.HasField("prompt_logprobs")
    bare = (await complete(harness, echo=True, max_tokens=0)).json
    assert (bare["choices"][0]["text"], bare["choices"][0]["logprobs"]) == ("1,", None)
    turns = [*CHAT, {"role": "assistant", "content": "so: "}]
    goes_on = {"continue_final_message": True, "echo": True, "messages": turns}
    for fields in (goes_on, {**goes_on, "add_generation_prompt": False}):
        message = (await chat(harness, **fields)).json["choices"][0]["message"]
        assert message["content"] == "so: 12é"


async def test_prompt_logprobs_have_vllm_s_format(harness: Harness) -> None:
    ids = demo_text().encode("1,")
    entry = {"logprob": -1.0, "rank": 1, "decoded_token": ","}
    rival = {"logprob": -2.0, "rank": 2, "decoded_token": demo_text().token_text(40)}
    choice = (await complete(harness, prompt_logprobs=2)).json["choices"][0]
    assert choice["prompt_logprobs"] == [None, {str(ids[1]): entry, "40": rival}]
    choice = (await complete(harness, prompt_logprobs=0)).json["choices"][0]
    assert choice["prompt_logprobs"] == [None, {str(ids[1]): {**entry, "rank": None}}]
    talk = (await chat(harness, prompt_logprobs=1)).json
    assert len(talk["prompt_logprobs"]) == talk["usage"]["prompt_tokens"]
    assert talk["choices"][0]["message"]["content"] == "12é"


async def test_missing_prompt_scores_are_an_error(harness: Harness) -> None:
    harness.worker.script = None
    pending = asyncio.ensure_future(complete(harness, echo=True, logprobs=0, max_tokens=0))
    await harness.until(lambda: bool(harness.worker.prompts))
    name = harness.worker.prompts[0].request_id
    harness.worker.send(name, 0, ANSWER[:1], common.FINISH_REASON_LENGTH)
    reply = await pending
    assert (reply.status, reply.json["error"]["message"]) == (
        500, "the worker scored 0 of 1 tokens of the prompt",
    )  # fmt: skip
    assert harness.gateway.live == 0


async def test_truncate_prompt_tokens_keeps_the_last_tokens(harness: Harness) -> None:
    ids = list(range(40, 60))
    await complete(harness, prompt=ids, truncate_prompt_tokens=3)
    assert list(harness.worker.prompts[-1].token_ids) == ids[-3:]
    await complete(harness, prompt=ids, truncate_prompt_tokens=30)
    assert list(harness.worker.prompts[-1].token_ids) == ids
    long = [*range(40, 640)]
    reply = await complete(
        harness, prompt=long, truncate_prompt_tokens=-1, max_tokens=12, echo=True
    )
    assert list(harness.worker.prompts[-1].token_ids) == long[-500:]
    assert reply.json["choices"][0]["text"].startswith(demo_text().decode(long[-500:], False)[:50])
    await complete(harness, prompt="1,2,3,4", truncate_prompt_tokens=2, echo=True)
    assert list(harness.worker.prompts[-1].token_ids) == demo_text().encode("1,2,3,4")[-2:]


async def test_chat_template_receives_client_options(harness: Harness) -> None:
    turns = [*CHAT, {"role": "assistant", "content": "well, "}]
    for fields, rendered in (
        ({}, "<|user|>1,<|end|><|assistant|>well, <|end|><|assistant|>"),
        ({"add_generation_prompt": False}, "<|user|>1,<|end|><|assistant|>well, <|end|>"),
        ({"continue_final_message": True}, "<|user|>1,<|end|><|assistant|>well, "),
        ({"chat_template_kwargs": {"mood": "good"}, "reasoning_effort": "low", "messages": CHAT},
         "<|user|>Think: 1,<|end|><|assistant|>"),
    ):  # fmt: skip
        assert (await chat(harness, **{"messages": turns, **fields})).status == 200
        ids = list(harness.worker.prompts[-1].token_ids)
        assert demo_text().decode(ids, skip_special_tokens=False) == rendered


async def test_text_parts_become_lines(harness: Harness) -> None:
    parts = [{"type": "text", "text": "red"}, {"type": "text", "text": "blue"}]
    await chat(harness, messages=[{"role": "user", "content": parts}])
    assert harness.scheduler.requests[-1].text.user_input == "red\nblue"


async def test_context_overflow_has_openai_s_wording(harness: Harness) -> None:
    for reply in (
        await chat(harness, messages=[{"role": "user", "content": "," * 600}]),
        await complete(harness, prompt="," * 600, stream=True),
    ):
        error = reply.json["error"]
        assert (reply.status, error["code"]) == (400, "context_length_exceeded")
        assert error["type"] == "invalid_request_error"
        assert error["message"].startswith(
            "This model's maximum context length is 512 tokens. However, you requested "
        )
        assert "Please reduce the length of the messages or completion." in error["message"]
    other = (await complete(harness, temperature=9)).json["error"]
    assert other["code"] is None


async def test_special_tokens_are_text_on_request() -> None:
    answer = [*tokens_of("1"), demo_text().encode("<|user|>")[0], *tokens_of("2"), END]
    async with run_harness(lambda _: answer) as harness:
        for fields, text in (
            ({}, "12"),
            ({"skip_special_tokens": False}, "1<|user|>2"),
            ({"skip_special_tokens": False, "include_stop_str_in_output": True},
             "1<|user|>2<|end|>"),
            ({"skip_special_tokens": False, "max_tokens": 4, "ignore_eos": True},
             "1<|user|>2<|end|>"),
            ({"skip_special_tokens": False, "stop": "<|user|>"}, "1"),
            ({"stop": "2", "include_stop_str_in_output": True}, "12"),
            ({"stop": "2"}, "1"),
        ):  # fmt: skip
            for stream in (False, True):
                reply = await complete(harness, stream=stream, **fields)
                if stream:
                    choices = [event["choices"][0] for event in reply.events]
                    assert "".join(choice["text"] for choice in choices) == text, fields
                else:
                    assert reply.json["choices"][0]["text"] == text, fields


async def test_unknown_fields_are_named_in_a_header(harness: Harness) -> None:
    for stream in (False, True):
        reply = await complete(harness, stream=stream, mood="good", max_token=3)
        assert reply.status == 200
        assert reply.headers["x-foretoken-ignored-fields"] == "mood, max_token"
        assert "x-foretoken-ignored-fields" not in (await complete(harness, stream=stream)).headers


async def test_unknown_fields_are_refused_with_a_suggestion() -> None:
    async with run_harness(lambda _: ANSWER, unknown_fields="refuse") as harness:
        reply = await complete(harness, max_token=3)
        assert (reply.status, reply.json["error"]["param"]) == (400, "max_token")
        content = "max_token: unknown field; did you mean max_tokens?"
        assert reply.json["error"]["message"] == content
        assert (await complete(harness, metadata={"a": "b"})).status == 200
