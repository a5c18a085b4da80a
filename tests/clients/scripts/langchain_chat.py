"""LangChain's chat and completion models: print the answers of the server at argv[1] as JSON."""

import asyncio
import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel


class Record(BaseModel):
    fruit: str
    number: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny, {len(city)} degrees"


to = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "model": "demo", "max_retries": 0}
chat = ChatOpenAI(temperature=0, stream_usage=True, **to)
text = OpenAI(temperature=0, max_tokens=20, **to)
ask = "Reverse: red blue green"
answer = chat.invoke(ask)
chunks = list(chat.stream(ask))
whole = chunks[0]
for chunk in chunks[1:]:
    whole += chunk
template = ChatPromptTemplate.from_messages([("system", "{task}"), ("user", "{words}")])
agent, extractor = chat.bind_tools([get_weather]), chat.with_structured_output(Record)
history = [HumanMessage("What is the weather in Paris?")]
called = agent.invoke(history)
call = called.tool_calls[0]
result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
streamed_call = None
for chunk in agent.stream(history):
    streamed_call = chunk if streamed_call is None else streamed_call + chunk
print(json.dumps({
    "called": [call["name"], call["args"]],
    "streamed_call": [streamed_call.tool_calls[0]["name"], streamed_call.tool_calls[0]["args"]],
    "concluded": agent.invoke([*history, called, result]).content,
    "by_schema": extractor.invoke("JSON: fruit plum, number 7").model_dump(),
    "answer": answer.content,
    "usage": answer.usage_metadata,
    "streamed": whole.content,
    "streamed_usage": whole.usage_metadata,
    "several": len(chunks) > 2,
    "batch": [each.content for each in chat.batch([f"Count from {n} to 5." for n in range(4)])],
    "chain": (template | chat).invoke({"task": "Sort the words.", "words": "pear fig"}).content,
    "async": asyncio.run(chat.ainvoke(ask)).content,
    "text": text.invoke("Emoji: cat moon\n"),
    "text_streamed": "".join(text.stream("Emoji: cat moon\n")),
}))  # fmt: skip
