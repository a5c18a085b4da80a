"""aisuite: prints the answers of the server at argv[1] as JSON."""

import json
import sys

import aisuite

openai = {"api_key": "none", "base_url": f"{sys.argv[1]}/v1"}
client = aisuite.Client(provider_configs={"openai": openai})


def ask(*turns: tuple[str, str]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    answer = client.chat.completions.create(
        model="openai:demo", messages=messages, temperature=0, max_tokens=50
    )
    return answer.choices[0].message.content


print(json.dumps({
    "answer": ask(("user", "Reverse: red blue green")),
    "instructed": ask(("system", "Sort the words."), ("user", "pear apple fig")),
}))  # fmt: skip
