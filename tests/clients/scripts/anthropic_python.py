"""Anthropic's own client for Python: prints the answers of the server at argv[1] as JSON."""

import asyncio
import json
import sys

import anthropic

URL = sys.argv[1]
ASK = [{"role": "user", "content": "Reverse: red blue green"}]
GREEDY = {"model": "demo", "max_tokens": 64, "extra_body": {"temperature": 0, "top_k": 5}}
CITY = {
    "type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [{"name": "weather", "description": "The weather of a city.", "input_schema": CITY}]
CHOICE = {"type": "any", "disable_parallel_tool_use": True}
FORCED = {**GREEDY, "max_tokens": 300, "tools": TOOLS, "tool_choice": CHOICE}


async def ask_async() -> str:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0) as client:
        return (await client.messages.create(messages=ASK, **GREEDY)).content[0].text


def refused(**fields) -> dict:
    try:
        client.messages.create(**{**GREEDY, "messages": ASK, **fields})
    except anthropic.APIStatusError as error:
        kind = type(error).__name__
        told = {"kind": kind, "status": error.status_code, "says": str(error)}
        return told | {"type": error.body["error"]["type"]}
    return {}


def called(message) -> list:
    (block,) = message.content
    return [[block.type, block.name, block.input["city"]], message.stop_reason]


with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
    ask = client.messages.create
    answer = ask(messages=ASK, **GREEDY)
    with client.messages.stream(messages=ASK, **GREEDY) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    counted = client.messages.count_tokens(model="demo", messages=ASK)
    words = {"role": "user", "content": [{"type": "text", "text": "pear apple fig"}]}
    instructed = ask(system="Sort the words.", messages=[words], **GREEDY)
    stopped = ask(messages=ASK, stop_sequences=["blue"], **GREEDY)
    limited = ask(messages=ASK, **{**GREEDY, "max_tokens": 1})
    with client.messages.stream(messages=ASK, **FORCED) as stream:
        called_in_stream = called(stream.get_final_message())
    print(json.dumps({
        "answer": answer.content[0].text,
        "stop": [answer.stop_reason, answer.stop_sequence],
        "usage": {"input_tokens": answer.usage.input_tokens + answer.usage.cache_read_input_tokens,
                  "output_tokens": answer.usage.output_tokens},
        "streamed": streamed,
        "final": final.content[0].text,
        "final_usage": {
            "input_tokens": final.usage.input_tokens + final.usage.cache_read_input_tokens,
            "output_tokens": final.usage.output_tokens,
        },
        "async": asyncio.run(ask_async()),
        "counted": counted.input_tokens,
        "instructed": instructed.content[0].text,
        "stopped": [stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence],
        "limited": limited.stop_reason,
        "called": called(ask(messages=ASK, **FORCED)),
        "called_in_stream": called_in_stream,
        "unknown": refused(model="nobody"),
        "overflow": refused(messages=[{"role": "user", "content": "red " * 3000}]),
    }))  # fmt: skip
