"""OpenAI's own client for Python: prints the answers of the server at argv[1] as JSON."""

import asyncio
import json
import sys

import openai

URL = f"{sys.argv[1]}/v1"
ASK = [{"role": "user", "content": "Reverse: red blue green"}]
PARTS = [{"type": "text", "text": "Copy: red"}, {"type": "text", "text": "blue"}]
GREEDY = {"model": "demo", "temperature": 0}


async def together() -> list:
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as client:

        async def one(n: int) -> str:
            content = f"Count from {n} to {n + 5}."
            answer = await client.chat.completions.create(
                messages=[{"role": "user", "content": content}], **GREEDY
            )
            return answer.choices[0].message.content

        return await asyncio.gather(*map(one, range(8)))


def refused(call) -> dict:
    try:
        call()
    except openai.APIStatusError as error:
        kind = type(error).__name__
        return {"kind": kind, "status": error.status_code, "code": error.code, "says": str(error)}
    return {}


with openai.OpenAI(base_url=URL, api_key="none", max_retries=0) as client:
    chat = client.chat.completions
    whole = chat.with_raw_response.create(messages=ASK, **GREEDY)
    answer = whole.parse()
    usage = {"include_usage": True}
    chunks = list(chat.create(messages=ASK, stream=True, stream_options=usage, **GREEDY))
    with chat.stream(messages=ASK, **GREEDY) as stream:
        streamed = stream.get_final_completion().choices[0].message.content
    prompt = "Emoji: cat moon\n"
    text = client.completions.create(prompt=prompt, max_tokens=20, logprobs=2, **GREEDY)
    texts = client.completions.create(prompt=[prompt, prompt], max_tokens=20, **GREEDY)
    scored = client.completions.create(
        prompt="Emoji: cat moon\n", max_tokens=0, echo=True, logprobs=1, **GREEDY
    )
    parts = chat.create(messages=[{"role": "user", "content": PARTS}], **GREEDY)
    joined = chat.create(messages=[{"role": "user", "content": "Copy: red\nblue"}], **GREEDY)
    instructed = chat.create(
        messages=[{"role": "developer", "content": "Sort the words."},
                  {"role": "user", "content": "pear apple fig"}],
        max_completion_tokens=50, stop=["\n\n"], n=2, seed=1, user="me", logprobs=True,
        top_logprobs=2, frequency_penalty=0, presence_penalty=0, top_p=1, tool_choice="none",
        response_format={"type": "text"}, store=False, metadata={"team": "a"},
        reasoning_effort="low", verbosity="low", service_tier="auto", logit_bias={}, **GREEDY,
    )  # fmt: skip
    item = {"model": "demo", "input": ASK[0]["content"], "temperature": 0}
    response = client.responses.create(**item)
    with client.responses.stream(**item) as stream:
        response_streamed = stream.get_final_response().output_text
    long = [{"role": "user", "content": "red " * 3000}]
    print(json.dumps({
        "models": [each.id for each in client.models.list()],
        "answer": answer.choices[0].message.content,
        "reason": answer.choices[0].finish_reason,
        "usage": answer.usage.to_dict(),
        "request_id": whole.headers.get("x-request-id"),
        "chunks": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "last_usage": chunks[-1].usage.to_dict(),
        "streamed": streamed,
        "text": text.choices[0].text,
        "tokens": len(text.choices[0].logprobs.tokens),
        "completion_tokens": text.usage.completion_tokens,
        "texts": [choice.text for choice in texts.choices],
        "scored": scored.choices[0].text,
        "scores": scored.choices[0].logprobs.token_logprobs,
        "parts": [parts.choices[0].message.content, parts.usage.prompt_tokens],
        "joined": [joined.choices[0].message.content, joined.usage.prompt_tokens],
        "instructed": [choice.message.content for choice in instructed.choices],
        "response": response.output_text,
        "response_streamed": response_streamed,
        "retrieved": client.responses.retrieve(response.id).output_text,
        "together": asyncio.run(together()),
        "unknown": refused(lambda: chat.create(messages=ASK, **{**GREEDY, "model": "nobody"})),
        "overflow": refused(lambda: chat.create(messages=long, **GREEDY)),
    }))  # fmt: skip
