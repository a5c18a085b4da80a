"""What the picker reads of an OpenAI request: its prompt as text, its length limit, its headers.
Pure.

A request that is not understood is placed like any other: its model server answers for its errors.
"""

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

OBJECTIVE_HEADER = "x-gateway-inference-objective"
TTFT_HEADER, TPOT_HEADER = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
READ_HEADERS = frozenset((OBJECTIVE_HEADER, TTFT_HEADER, TPOT_HEADER))
MAX_HEADER_CHARS = 256  # of each of these
MAX_CHOICES = 1_024  # counted of one request
SYSTEM_ROLES = frozenset(("system", "developer"))
NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")


class HeaderError(ValueError):
    """A header that cannot be read, in one sentence that names it."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request's body. `prefix` is the prompt as bytes that begin alike where prompts do;
    `instruction` and `user_input` are its parts for a predictor. `max_tokens` 0: not stated."""

    model: str = ""
    prefix: bytes = b""
    instruction: str = ""
    user_input: str = ""
    prompt_tokens: int = 0  # 0: unknown
    max_tokens: int = 0
    choices: int = 1
    streams: bool = False
    salt: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Terms:
    """What headers ask for; infinite budgets where none is given."""

    objective: str = ""
    ttft_s: float = inf
    tpot_s: float = inf


def read_terms(headers: Mapping[str, str]) -> Terms:
    """Raises HeaderError."""
    for name in READ_HEADERS & headers.keys():
        if len(headers[name]) > MAX_HEADER_CHARS:
            raise HeaderError(f"{name}: at most {MAX_HEADER_CHARS} characters")
    return Terms(
        headers.get(OBJECTIVE_HEADER, ""),
        _read_ms(headers, TTFT_HEADER),
        _read_ms(headers, TPOT_HEADER),
    )


def _read_ms(headers: Mapping[str, str], name: str) -> float:
    text = headers.get(name, "").strip()
    if not text:
        return inf
    if not NUMBER.fullmatch(text) or not float(text):
        raise HeaderError(f"{name}: must be a positive number of milliseconds, not {text!r}")
    return float(text) / 1_000


def read_question(body: bytes) -> Question:
    """The question of a body; an empty one if it is no JSON object. O(bytes)."""
    try:
        fields = json.loads(body) if body else {}
    except (ValueError, RecursionError):
        return Question(prefix=body)
    if not isinstance(fields, dict):
        return Question(prefix=body)
    model = _text(fields.get("model"))
    limit = fields.get("max_completion_tokens") or fields.get("max_tokens")
    common = {
        "model": model,
        "max_tokens": limit if isinstance(limit, int) and 0 < limit < 2**24 else 0,
        "choices": _count(fields.get("n")),
        "streams": fields.get("stream") is True,
        "salt": _text(fields.get("cache_salt")),
    }
    messages = fields.get("messages")
    if isinstance(messages, list):
        return _read_chat(messages, fields.get("tools"), common)
    return _read_prompt(fields.get("prompt"), common)


def _read_chat(messages: list[Any], tools: object, common: dict[str, Any]) -> Question:
    parts = [json.dumps(tools).encode()] if tools else []
    instruction, user_input = "", ""
    for message in messages:
        if not isinstance(message, dict):
            continue
        role, content = _text(message.get("role")), message.get("content")
        text = content if isinstance(content, str) else json.dumps(content)
        parts.append(f"{role}\0{text}\0".encode(errors="surrogatepass"))
        if role in SYSTEM_ROLES:
            instruction = instruction or text
        elif role == "user":
            user_input = text
    return Question(
        prefix=b"".join(parts), instruction=instruction, user_input=user_input, **common
    )


def _read_prompt(prompt: object, common: dict[str, Any]) -> Question:
    """Of several prompts the first one, with as many choices more."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        common = {**common, "choices": min(MAX_CHOICES, common["choices"] * len(prompt))}
        prompt = prompt[0]
    if isinstance(prompt, str):
        encoded = prompt.encode(errors="surrogatepass")
        return Question(prefix=encoded, user_input=prompt, **common)
    if isinstance(prompt, list) and all(type(t) is int and 0 <= t < 2**32 for t in prompt):
        return Question(prefix=array("I", prompt).tobytes(), prompt_tokens=len(prompt), **common)
    return Question(**common)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int:
    return min(value, MAX_CHOICES) if isinstance(value, int) and value > 0 else 1
