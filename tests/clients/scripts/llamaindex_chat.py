"""LlamaIndex's OpenAI-like model: prints the answers of the server at argv[1] as JSON."""

import asyncio
import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def get_weather(city: str) -> str:
    """The weather in a city."""
    return "sunny"


to = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "model": "demo", "max_retries": 0,
      "temperature": 0, "context_window": 2048}  # fmt: skip
chat = OpenAILike(is_chat_model=True, **to)
text = OpenAILike(is_chat_model=False, max_tokens=20, **to)
ask = [ChatMessage(role="user", content="Reverse: red blue green")]
agent = OpenAILike(is_chat_model=True, is_function_calling_model=True, **to)
called = agent.chat_with_tools(
    [FunctionTool.from_defaults(get_weather)], user_msg="What is the weather in Paris?"
)
[call] = agent.get_tool_calls_from_response(called)
print(json.dumps({
    "called": [call.tool_name, call.tool_kwargs],
    "answer": chat.chat(ask).message.content,
    "streamed": "".join(each.delta or "" for each in chat.stream_chat(ask)),
    "async": asyncio.run(chat.achat(ask)).message.content,
    "completed_by_chat": str(chat.complete("Sort: pear fig")),
    "text": str(text.complete("Emoji: cat moon\n")),
    "text_streamed": "".join(each.delta or "" for each in text.stream_complete("Copy: sun\n")),
}))  # fmt: skip
