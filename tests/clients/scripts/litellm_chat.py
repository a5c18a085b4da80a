"""litellm: prints the answers of the server at argv[1] as JSON, and whether it falls back."""

import asyncio
import json
import sys

import litellm

URL = f"{sys.argv[1]}/v1"
TO = {"api_base": URL, "api_key": "none", "temperature": 0, "num_retries": 0}
ASK = [{"role": "user", "content": "Reverse: red blue green"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
LONG = [{"role": "user", "content": "red " * 3000}]


def overflow(model: str, **fields) -> dict:
    """What an answer too long for the context raises."""
    try:
        litellm.completion(model=model, messages=LONG, **TO, **fields)
    except litellm.ContextWindowExceededError as error:
        return {"kind": "ContextWindowExceededError", "says": str(error)}
    except Exception as error:
        return {"kind": type(error).__name__, "says": str(error)}
    return {}


def fallen_back() -> str:
    """The answer of the model that a router turns to when a prompt is too long for the first."""
    large = {"model": "openai/large", "api_key": "none", "mock_response": "from the larger model"}
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": {"model": "openai/demo", **TO}},
            {"model_name": "large", "litellm_params": large},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    return router.completion(model="small", messages=LONG).choices[0].message.content


def called(model: str) -> dict:
    """The call of a tool, complete and streamed, and the answer with its result."""
    asked = {"role": "user", "content": "What is the weather in Paris?"}
    given = {"model": model, "tools": [WEATHER], **TO}
    message = litellm.completion(messages=[asked], **given).choices[0].message
    chunks = list(litellm.completion(messages=[asked], stream=True, **given))
    streamed = litellm.stream_chunk_builder(chunks).choices[0]
    result = {"tool_call_id": message.tool_calls[0].id, "content": "sunny, 5 degrees"}
    history = [asked, message.model_dump(), {"role": "tool", **result}]
    return {
        "calls": [
            [each.function.name, json.loads(each.function.arguments)]
            for each in (*message.tool_calls, *streamed.message.tool_calls)
        ],
        "reason": streamed.finish_reason,
        "concluded": litellm.completion(messages=history, **given).choices[0].message.content,
    }


answer = litellm.completion(model="openai/demo", messages=ASK, **TO)
usage = {"include_usage": True}
chunks = list(
    litellm.completion(
        model="openai/demo", messages=ASK, stream=True, stream_options=usage, **TO
    )
)  # fmt: skip
text = {"model": "text-completion-openai/demo", "prompt": "Emoji: cat moon\n", "max_tokens": 20}
hosted = litellm.completion(model="hosted_vllm/demo", messages=ASK, **TO)
print(json.dumps({
    "answer": answer.choices[0].message.content,
    "usage": answer.usage.model_dump(),
    "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "streamed_tokens": chunks[-1].usage.completion_tokens,
    "async": asyncio.run(litellm.acompletion(model="openai/demo", messages=ASK, **TO))
    .choices[0].message.content,
    "text": litellm.text_completion(**text, **TO).choices[0].text,
    "hosted_vllm": hosted.choices[0].message.content,
    "overflow": overflow("openai/demo"),
    "overflow_vllm": overflow("hosted_vllm/demo"),
    "fallen_back": fallen_back(),
    "called": called("openai/demo"),
    "called_vllm": called("hosted_vllm/demo"),
}))  # fmt: skip
