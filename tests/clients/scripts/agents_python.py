"""Instructor, and an agent of Pydantic AI that calls three tools: print what the server at argv[1]
answers, as JSON."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = f"{sys.argv[1]}/v1"


class Record(BaseModel):
    fruit: str
    number: int


def extract(mode: instructor.Mode) -> dict:
    client = instructor.from_openai(openai.OpenAI(base_url=URL, api_key="none"), mode=mode)
    ask = [{"role": "user", "content": "JSON: fruit plum, number 7"}]
    found = client.chat.completions.create(
        model="demo", temperature=0, messages=ask, response_model=Record, max_retries=0
    )
    return found.model_dump()


agent = Agent(
    OpenAIChatModel("demo", provider=OpenAIProvider(base_url=URL, api_key="none")),
    model_settings={"temperature": 0},
)


@agent.tool_plain
def calculate(expression: str) -> str:
    return {"37 + 45": "82", "90 - 12": "78"}[expression]


@agent.tool_plain
def get_weather(city: str) -> str:
    return "snowy, 3 degrees" if city == "Oslo" else "sunny, 21 degrees"


answers, history = [], []
for question in ("What is 37 + 45?", "What is the weather in Oslo?", "What is 90 - 12?"):
    run = agent.run_sync(question, message_history=history)
    answers.append(run.output)
    history = run.all_messages()
calls = [p.tool_name for m in history for p in m.parts if isinstance(p, ToolCallPart)]
print(json.dumps({
    "by_schema": extract(instructor.Mode.JSON_SCHEMA),
    "answers": answers,
    "calls": calls,
}))  # fmt: skip
