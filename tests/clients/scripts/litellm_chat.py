"""litellm: prints the answers of the server at argv[1] as JSON, and whether it falls back."""

import asyncio
import json
import sys

import litellm

URL = f"{sys.argv[1]}/v1"
TO = {"api_base": URL, "api_key": "none", "temperature": 0, "num_retries": 0}
ASK = [{"role": "user", "content": "Reverse: red blue green"}]
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
}))  # fmt: skip
