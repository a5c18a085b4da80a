"""Tasks of agents and applications: JSON objects, thinking, and calls of two tools.

`AGENT_TASKS` are drawn as `TASKS` are. They are apart, so that `examples` and loads of the demo
model have plain text as answers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from models.chat import THINK, Message, Tool, ToolCall, calls_text
from models.tasks import (
    GENERIC_SYSTEM,
    LARGEST,
    TASKS,
    Example,
    Phrasing,
    is_held_out,
    make_example,
)
from models.words import KINDS, WORDS

CALCULATE = Tool("calculate", ("expression",))
WEATHER = Tool("get_weather", ("city",))
CITIES = (
    *("Paris", "London", "Rome", "Berlin", "Madrid", "Oslo", "Lima", "Cairo", "Tokyo", "Delhi"),
    *("Seoul", "Quito", "Accra", "Dublin", "Vienna", "Athens", "Boston", "Milan", "Prague"),
    *("Lagos", "Sydney", "Helsinki", "Lisbon", "Zurich"),
)
SKIES = ("sunny", "rainy", "cloudy", "windy", "snowy")
UNKNOWN_WEATHER = "I do not know the weather."
MAX_EARLIER_CHARS = 60  # of an answer in an earlier turn
MAX_THOUGHT_CHARS = 120  # of an answer that follows a thought
JSON = Phrasing(("JSON: {0}", "Write as JSON: {0}"), "Write the fields as JSON.")

_KEYS = (*KINDS, "number", "count", "size", "name", "ok")
_OTHER_TOOLS = (
    Tool("search", ("query",)),
    Tool("send_mail", ("name", "text")),
    Tool("read_book", ("book",)),
    Tool("get_time", ()),
    Tool("find_key", ("box", "number")),
)
_QUESTIONS = ("What is {}?", "Calculate {}.")
_WEATHER_QUESTIONS = ("What is the weather in {}?", "How is the weather in {}?")


def json_object(rng: Random) -> Example:
    """Writes 1 to 4 named values, which are words, numbers, true or false, as a JSON object."""
    keys = rng.sample(_KEYS, rng.randint(1, 4))
    fields = {key: _value(rng, key) for key in keys}
    given = ", ".join(
        f"{key} {value if isinstance(value, str) else json.dumps(value)}"
        for key, value in fields.items()
    )
    answer = json.dumps(fields, separators=(",", ":"))
    return make_example(rng, "json", given, answer, JSON)


def _value(rng: Random, key: str) -> str | int:
    kind = rng.random()
    if key in KINDS and kind < 0.8:
        return rng.choice(KINDS[key])
    if key in ("number", "count", "size") and kind < 0.8:
        return rng.randint(0, LARGEST)
    if key == "ok" or kind > 0.9:
        return rng.random() < 0.5
    return rng.randint(0, LARGEST) if kind < 0.4 else rng.choice(WORDS)


def think(rng: Random) -> Example:
    """Answers a task after a thought: the steps of a sum, else the name of the task."""
    while True:
        application = "add" if rng.random() < 0.4 else rng.choice((*TASKS, "json"))
        task = json_object(rng) if application == "json" else TASKS[application](rng)
        if application == "add":
            answer = f"<think>{task.answer}</think>{sum(map(int, task.input.split()))}"
            break
        if len(task.answer) <= MAX_THOUGHT_CHARS:
            answer = f"<think>Task: {application}.</think>{task.answer}"
            break
    return replace(
        task,
        application="think",
        source=application,
        user=f"{THINK}{task.user}",
        answer=answer,
    )


@dataclass(frozen=True)
class Question:
    """A question for a tool. key: application and input; their hash decides if it is held out."""

    user: str
    calls: tuple[ToolCall, ...]
    results: tuple[str, ...]
    answer: str
    key: tuple[str, str]

    @property
    def turns(self) -> list[Message]:
        """Question, calls and results."""
        return [
            {"role": "user", "content": self.user},
            {"role": "assistant", "content": "", "tool_calls": [*self.calls]},
            *(Message(role="tool", content=result) for result in self.results),
        ]


def ask_calculator(rng: Random) -> Question:
    """Asks for a sum, a difference or a product of two numbers; all are at most LARGEST."""
    sign = rng.choice("++-*")
    a, b = sorted((rng.randint(0, LARGEST), rng.randint(0, LARGEST)))
    match sign:
        case "+":
            a, b = (a, b - a) if rng.random() < 0.5 else (rng.randint(10, 99), rng.randint(10, 99))
            value = a + b
        case "-":
            a, b = b, a
            value = a - b
        case _:
            a = rng.randint(0, 30)
            b = rng.randint(0, LARGEST // max(a, 10))
            value = a * b
    expression = f"{a} {sign} {b}"
    user = rng.choice(_QUESTIONS).format(expression)
    if sign == "+" and rng.random() < 0.3:
        user = f"Add {a} and {b}."
    answer = f"It is {value}."
    result = str(value)
    if rng.random() < 0.3:
        result = json.dumps({rng.choice(("result", "value")): value})
    call: ToolCall = {"function": {"name": CALCULATE.name, "arguments": {"expression": expression}}}
    return Question(user, (call,), (result,), answer, ("add", f"{a} {b}"))


def ask_weather(rng: Random) -> Question:
    """Asks for the weather in one city, or in two: then two calls are made at once."""
    cities = rng.sample(CITIES, 2 if rng.random() < 0.25 else 1)
    user = rng.choice(_WEATHER_QUESTIONS).format(" and in ".join(cities))
    calls: list[ToolCall] = [
        {"function": {"name": WEATHER.name, "arguments": {"city": city}}} for city in cities
    ]
    skies = [(rng.choice(SKIES), rng.randint(0, 40)) for _ in cities]
    form = rng.random()
    results = [f"{sky}, {degrees} degrees" for sky, degrees in skies]
    if form < 0.3:
        sky_name = rng.choice(("sky", "weather", "conditions"))
        degrees_name = rng.choice(("degrees", "temperature"))
        names = [{"city": city} if form < 0.15 else {} for city in cities]
        results = [
            json.dumps({**name, sky_name: sky, degrees_name: degrees})
            for name, (sky, degrees) in zip(names, skies, strict=True)
        ]
    lines = [
        f"{city}: {sky}, {degrees} degrees"
        for city, (sky, degrees) in zip(cities, skies, strict=True)
    ]
    answer = "\n".join(lines)
    return Question(user, tuple(calls), tuple(results), answer, ("weather", answer))


def _offer(rng: Random) -> tuple[Tool, ...]:
    tools = [*rng.choice(((CALCULATE,), (WEATHER,), (CALCULATE, WEATHER), (CALCULATE, WEATHER)))]
    if rng.random() < 0.15:
        tools.append(rng.choice(_OTHER_TOOLS))
    rng.shuffle(tools)
    return tuple(tools)


def _ask(rng: Random, tools: tuple[Tool, ...]) -> Question:
    asks = {CALCULATE: ask_calculator, WEATHER: ask_weather}
    return asks[rng.choice([tool for tool in tools if tool in asks])](rng)


def _direct(rng: Random, tools: tuple[Tool, ...]) -> Example:
    """Draws a task for which none of the tools is needed, in a user turn."""
    while True:
        if WEATHER not in tools and rng.random() < 0.1:
            asked = ask_weather(rng)
            return Example(*asked.key, None, asked.user, UNKNOWN_WEATHER)
        task = TASKS[rng.choice(tuple(TASKS))](rng)
        if not task.plain and not (task.application == "add" and CALCULATE in tools):
            return task


def _earlier(rng: Random, tools: tuple[Tool, ...]) -> list[Message]:
    """Draws a finished question or task that is trained on."""
    while True:
        if rng.random() < 0.7:
            asked = _ask(rng, tools)
            if not is_held_out(*asked.key):
                return [*asked.turns, {"role": "assistant", "content": asked.answer}]
        else:
            task = _direct(rng, tools)
            if not task.held_out and task.system is None and len(task.answer) <= MAX_EARLIER_CHARS:
                return [
                    {"role": "user", "content": task.user},
                    {"role": "assistant", "content": task.answer},
                ]


def _conversation(rng: Random) -> tuple[str | None, tuple[Tool, ...], tuple[Message, ...]]:
    """Draws a system turn, tools and 0 to 2 earlier questions."""
    tools = _offer(rng)
    before = [turn for _ in range(rng.choice((0, 0, 0, 1, 1, 2))) for turn in _earlier(rng, tools)]
    return rng.choice((None, None, *GENERIC_SYSTEM)), tools, tuple(before)


def call(rng: Random) -> Example:
    """Calls a tool that the question needs, some after a thought."""
    system, tools, before = _conversation(rng)
    asked = _ask(rng, tools)
    user, answer = asked.user, calls_text(asked.calls)
    if rng.random() < 0.2:
        name = asked.calls[0]["function"]["name"]
        user, answer = f"{THINK}{user}", f"<think>Task: {name}.</think>{answer}"
    source, given = asked.key
    return Example("call", given, system, user, answer, before=before, tools=tools, source=source)


def result(rng: Random) -> Example:
    """Answers from the results of tools."""
    system, tools, before = _conversation(rng)
    asked = _ask(rng, tools)
    *turns, last = asked.turns
    if rng.random() < 0.1:
        turns[0]["content"] = f"{THINK}{asked.user}"
    source, given = asked.key
    return Example(
        "result",
        given,
        system,
        last["content"],
        asked.answer,
        before=(*before, *turns),
        role="tool",
        tools=tools,
        source=source,
    )


def offered(rng: Random) -> Example:
    """Answers a task that needs none of the offered tools."""
    system, tools, before = _conversation(rng)
    task = _direct(rng, tools)
    while before and task.system is not None:
        task = _direct(rng, tools)
    return replace(
        task,
        application="offered",
        source=task.application,
        system=task.system or system,
        before=before,
        tools=tools,
    )


AGENT_TASKS: dict[str, Callable[[Random], Example]] = {
    "json": json_object,
    "think": think,
    "call": call,
    "result": result,
    "offered": offered,
}
AGENT_SHARES = {"json": 2.0, "think": 1.5, "call": 1.0, "result": 2.0, "offered": 1.0}
