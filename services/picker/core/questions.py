"""What the picker reads of an OpenAI request: its prompt as text, its length limit, its headers.
Pure.

A request that is not understood is placed like any other: its model server answers for its errors.
"""

import json
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf
from typing import Any

OBJECTIVE_HEADER = "x-gateway-inference-objective"
TTFT_HEADER, TPOT_HEADER = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"
BEARER_HEADER, KEY_HEADER = "authorization", "x-api-key"
TERM_HEADERS = frozenset((OBJECTIVE_HEADER, TTFT_HEADER, TPOT_HEADER))
READ_HEADERS = TERM_HEADERS | {BEARER_HEADER, KEY_HEADER}
MAX_HEADER_CHARS = 256  # of each of TERM_HEADERS
MAX_CHOICES = 1_024  # counted of one request
MAX_NAME_CHARS = 256  # of a model and a salt
DIGEST_BYTES = 16
SYSTEM_ROLES = frozenset(("system", "developer"))
NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
# Keys and values of a body that is parsed. Parsing holds the interpreter, which delays all other
# streams: so many take up to 30 ms of CPU time, the 2,800,000 of 8 MiB 200 ms.
MAX_VALUES = 2**18
SEPARATORS = b",[{:"  # one before each key and value but the first
# The closing quote is optional: if it were required, a string without one would be searched again
# from each of its escaped quotes.
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class HeaderError(ValueError):
    """A header that cannot be read, in one sentence that names it."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request's body. `prefix` is the prompt as bytes that begin alike where prompts do;
    `instruction` and `user_input` are its parts for a predictor. `max_tokens` 0: not stated.
    `whole_text`: the prefix is the text of all that its usage counts as prompt."""

    model: str = ""
    prefix: bytes = b""
    instruction: str = ""
    user_input: str = ""
    prompt_tokens: int = 0  # 0: unknown
    max_tokens: int = 0
    choices: int = 1
    streams: bool = False
    salt: str = field(default="", repr=False)
    whole_text: bool = True


@dataclass(frozen=True, slots=True)
class Terms:
    """What headers ask for; infinite budgets where none is given. `api_key`: the one that the model
    server gets, empty without one."""

    objective: str = ""
    ttft_s: float = inf
    tpot_s: float = inf
    api_key: str = field(default="", repr=False)


def read_terms(headers: Mapping[str, str]) -> Terms:
    """Raises HeaderError."""
    for name in TERM_HEADERS & headers.keys():
        if len(headers[name]) > MAX_HEADER_CHARS:
            raise HeaderError(f"{name}: at most {MAX_HEADER_CHARS} characters")
    return Terms(
        headers.get(OBJECTIVE_HEADER, ""),
        _read_ms(headers, TTFT_HEADER),
        _read_ms(headers, TPOT_HEADER),
        headers.get(BEARER_HEADER, "").removeprefix("Bearer ") or headers.get(KEY_HEADER, ""),
    )


def _read_ms(headers: Mapping[str, str], name: str) -> float:
    text = headers.get(name, "").strip()
    if not text:
        return inf
    if not NUMBER.fullmatch(text) or not float(text):
        raise HeaderError(f"{name}: must be a positive number of milliseconds, not {text!r}")
    return float(text) / 1_000


def read_question(body: bytes) -> Question:
    """The question of a body. One that is no JSON object, or has over MAX_VALUES values, is known
    by its bytes alone. O(bytes)."""
    if _has_more_values(body, MAX_VALUES):
        return Question(prefix=body, whole_text=False)
    try:
        fields = json.loads(body.decode(errors="surrogatepass")) if body else {}
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


def _has_more_values(body: bytes, most: int) -> bool:
    """Whether a JSON text has more keys and values than that. O(bytes)."""
    if _count_separators(body) <= most:  # those within strings included
        return False
    found = end = 0
    for string in STRING.finditer(body):
        found += _count_separators(body[end : string.start()])
        end = string.end()
        if found > most:
            return True
    return found + _count_separators(body[end:]) > most


def _count_separators(text: bytes) -> int:
    return len(text) - len(text.translate(None, SEPARATORS))


def _read_chat(messages: list[Any], tools: object, common: dict[str, Any]) -> Question:
    parts = [json.dumps(tools).encode()] if tools else []
    instruction, user_input, whole_text = "", "", True
    for message in messages:
        if not isinstance(message, dict):
            continue
        role, content = _text(message.get("role")), message.get("content")
        text, others = _split_content(content)
        whole_text = whole_text and not others
        parts.append(f"{role}\0{text}\0".encode(errors="surrogatepass") + others)
        if role in SYSTEM_ROLES:
            instruction = instruction or text
        elif role == "user":
            user_input = text
    return Question(
        prefix=b"".join(parts),
        instruction=instruction,
        user_input=user_input,
        whole_text=whole_text,
        **common,
    )


def _split_content(content: object) -> tuple[str, bytes]:
    """A message's text, and a digest of its other parts: their bytes say nothing about their
    tokens. The digest is empty without such parts."""
    if isinstance(content, str):
        return content, b""
    texts, others = [], []
    for part in content if isinstance(content, list) else ():
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            texts.append(text)
        else:
            others.append(part)
    encoded = json.dumps(others).encode() if others else b""
    return "".join(texts), encoded and blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def _read_prompt(prompt: object, common: dict[str, Any]) -> Question:
    """Of several prompts the first one, with as many choices more."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        common["choices"] = min(MAX_CHOICES, common["choices"] * len(prompt))
        common["whole_text"] = len(prompt) == 1
        prompt = prompt[0]
    if isinstance(prompt, str):
        encoded = prompt.encode(errors="surrogatepass")
        return Question(prefix=encoded, user_input=prompt, **common)
    if isinstance(prompt, list) and all(type(t) is int and 0 <= t < 2**32 for t in prompt):
        common["whole_text"] = False
        return Question(prefix=array("I", prompt).tobytes(), prompt_tokens=len(prompt), **common)
    return Question(**common)


def _text(value: object) -> str:
    """The start of a name, without lone surrogates: they have no bytes."""
    if not isinstance(value, str):
        return ""
    return value[:MAX_NAME_CHARS].encode(errors="replace").decode()


def _count(value: object) -> int:
    return min(value, MAX_CHOICES) if isinstance(value, int) and value > 0 else 1
