"""Checks of any foretoken server with the official `openai` client, for any model.

Each check takes the server's base URL. Checks compare answers with one another: greedy answers
repeat. So the same checks hold for scripted tokens and for a real model.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

Check = Callable[[str], Awaitable[None]]
CHECKS: list[Check] = []
QUESTION: Any = [{"role": "user", "content": "copy: apple banana cherry apple banana cherry"}]
PROMPT = "copy: apple banana cherry apple banana cherry\n"
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 24}


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


@asynccontextmanager
async def connected(url: str) -> Any:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def ask(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.chat.completions.create(messages=QUESTION, **{**GREEDY, **fields})


async def complete(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.completions.create(**{"prompt": PROMPT, **GREEDY, **fields})


@check
async def chat_answers(url: str) -> None:
    async with connected(url) as client:
        answer = await ask(client)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == "demo"
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    usage = answer.usage
    assert 0 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@check
async def chat_streams_the_same_answer(url: str) -> None:
    async with connected(url) as client:
        whole = await ask(client)
        chunks = [
            c async for c in await ask(client, stream=True, stream_options={"include_usage": True})
        ]
    *parts, last = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text == whole.choices[0].message.content
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons == [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(part.usage is None for part in parts)
    assert len({part.id for part in chunks}) == 1


@check
async def forecasts_are_sent_beside_chunks_on_request(url: str) -> None:
    options = {"include_usage": True, "include_forecast": True}
    async with connected(url) as client:
        whole = await ask(client)
        talk = [c async for c in await ask(client, stream=True, stream_options=options)]
        extra = {"stream_options": options}
        raw = [c async for c in await complete(client, stream=True, extra_body=extra)]
        plain = [c async for c in await ask(client, stream=True)]
    assert all("forecast" not in chunk.model_extra for chunk in plain)
    text = "".join(part.choices[0].delta.content or "" for part in talk[:-1])
    assert text == whole.choices[0].message.content
    for *parts, last in (talk, raw):
        assert last.usage.completion_tokens > 0 and "forecast" not in last.model_extra
        result = [part.forecast for part in parts if "forecast" in part.model_extra]
        for forecast in result:
            assert (
                0
                <= forecast["low_tokens"]
                <= forecast["expected_tokens"]
                <= forecast["high_tokens"]
                <= 24
            )
            assert forecast["end_s"] >= 0
        if result:  # a short answer may end before its first forecast
            assert result[0]["ttft_s"] > 0 and result[0]["sla_expected"] in (True, False)
            assert result[-1]["expected_tokens"] == last.usage.completion_tokens


@check
async def completions_stream_the_same_answer(url: str) -> None:
    async with connected(url) as client:
        whole = await complete(client)
        parts = [part async for part in await complete(client, stream=True)]
    assert whole.object == "text_completion"
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@check
async def blocking_client_gets_the_same_answer(url: str) -> None:
    def blocking() -> tuple[str | None, str]:
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
            parts = client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY)
            return whole.choices[0].message.content, "".join(
                part.choices[0].delta.content or "" for part in parts
            )

    whole, streamed = await asyncio.to_thread(blocking)
    assert whole == streamed


@check
async def max_tokens_cuts_and_says_so(url: str) -> None:
    async with connected(url) as client:
        whole = await complete(client)
        cut = await complete(client, max_tokens=2)
        aliased = await ask(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=2)
    assert cut.choices[0].finish_reason == aliased.choices[0].finish_reason == "length"
    assert cut.usage.completion_tokens == aliased.usage.completion_tokens == 2
    assert whole.choices[0].text.startswith(cut.choices[0].text)


@check
async def stop_strings_end_the_answer_before_them(url: str) -> None:
    async with connected(url) as client:
        text = (await ask(client)).choices[0].message.content
        stop = text[len(text) // 2 :][:3]
        assert stop, text
        one = await ask(client, stop=stop)
        many = await ask(client, stop=["\x00never", stop])
        streamed = [part async for part in await ask(client, stop=stop, stream=True)]
    expected = text[: text.index(stop)]
    assert (one.choices[0].message.content, one.choices[0].finish_reason) == (expected, "stop")
    assert many.choices[0].message.content == expected
    assert "".join(part.choices[0].delta.content or "" for part in streamed) == expected
    assert streamed[-1].choices[0].finish_reason == "stop"


@check
async def n_and_many_prompts_are_numbered_in_order(url: str) -> None:
    async with connected(url) as client:
        several = await ask(client, n=3, seed=5, temperature=1)
        again = await ask(client, n=3, seed=5, temperature=1)
        singles = [await ask(client, seed=5 + i, temperature=1) for i in range(3)]
        prompts = await complete(client, prompt=[PROMPT, "reverse: 1 2 3\n"], n=2)
        alone = await complete(client, prompt="reverse: 1 2 3\n")
    texts = [choice.message.content for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts == [answer.choices[0].message.content for answer in singles]
    assert several.usage.prompt_tokens == singles[0].usage.prompt_tokens
    assert [choice.index for choice in prompts.choices] == [0, 1, 2, 3]
    assert prompts.choices[0].text == prompts.choices[1].text
    assert prompts.choices[2].text == prompts.choices[3].text == alone.choices[0].text


@check
async def streamed_choices_equal_complete_choices(url: str) -> None:
    async with connected(url) as client:
        whole = await ask(client, n=3, seed=5, temperature=1)
        texts, ended = ["", "", ""], [0, 0, 0]
        async for part in await ask(client, n=3, seed=5, temperature=1, stream=True):
            for choice in part.choices:
                texts[choice.index] += choice.delta.content or ""
                ended[choice.index] += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert ended == [1, 1, 1]


@check
async def logprobs_cover_every_token(url: str) -> None:
    async with connected(url) as client:
        talk = await ask(client, logprobs=True, top_logprobs=3, max_tokens=6)
        bare = await ask(client, logprobs=True, max_tokens=6)
        raw = await complete(client, logprobs=2, max_tokens=6)
        parts = [p async for p in await ask(client, logprobs=True, max_tokens=6, stream=True)]
    content = talk.choices[0].logprobs.content
    assert len(content) == talk.usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in content)
    assert all(not entry.top_logprobs for entry in bare.choices[0].logprobs.content)
    spelled = b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace")
    assert spelled.startswith(talk.choices[0].message.content)
    columns = raw.choices[0].logprobs
    assert len(columns.tokens) == len(columns.token_logprobs) == raw.usage.completion_tokens
    assert columns.text_offset[0] == 0
    streamed = [entry for p in parts for entry in p.choices[0].logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in content]


@check
async def token_ids_are_prompts_too(url: str) -> None:
    async with connected(url) as client:
        one = await complete(client, prompt=[40, 41, 42], max_tokens=4)
        two = await complete(client, prompt=[[40, 41, 42], [40, 41]], max_tokens=4)
    assert one.usage.prompt_tokens == 3
    assert two.usage.prompt_tokens == 5
    assert two.choices[0].text == one.choices[0].text


@check
async def models_are_listed(url: str) -> None:
    async with connected(url) as client:
        names = [model.id async for model in client.models.list()]
        assert (await client.models.retrieve("demo")).id == "demo"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-9")
    assert names == ["demo"]


@check
async def mistakes_name_the_field(url: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f g"}}]
    async with connected(url) as client:
        for fields, name in (
            ({"temperature": 9}, "temperature"),
            ({"n": 0}, "n"),
            ({"tools": tools}, "tools[0].function.name"),
            ({"extra_body": {"response_format": {"type": "yaml"}}}, "response_format.type"),
            ({"max_tokens": 10**6}, "max_tokens"),
            ({"extra_body": {"min_p": 7}}, "min_p"),
            ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
            ({"extra_body": {"cache_salt": "s" * 257}}, "cache_salt"),
            ({"extra_headers": {"x-foretoken-sla": "gold"}}, "sla"),
            (
                {"extra_body": {"stream_options": {"include_forecast": "yes"}}},
                "stream_options.include_forecast",
            ),
        ):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as caught:
                    await ask(client, stream=stream, **fields)
                assert caught.value.param == name, fields
        with pytest.raises(openai.NotFoundError) as missing:
            await ask(client, model="gpt-9")
        assert missing.value.code == "model_not_found"


@check
async def vllm_fields_and_foretoken_headers_are_accepted(url: str) -> None:
    extra = {
        "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3, "ignore_eos": True,
        "cache_salt": "mine",
    }  # fmt: skip
    headers = {"x-foretoken-sla": "interactive,ttft_s=9", "x-request-timeout-s": "60"}
    async with connected(url) as client:
        answer = await ask(client, extra_body=extra, extra_headers=headers, max_tokens=4)
    assert answer.usage.completion_tokens >= 3


@check
async def client_can_close_a_stream_early(url: str) -> None:
    async with connected(url) as client:
        stream = await ask(client, stream=True)
        async for _ in stream:
            break
        await stream.close()
        assert (await ask(client, max_tokens=2)).usage.completion_tokens == 2
