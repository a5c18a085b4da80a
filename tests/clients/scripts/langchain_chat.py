"""LangChain's chat and completion models: print the answers of the server at argv[1] as JSON."""

import asyncio
import json
import sys

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI

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
print(json.dumps({
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
