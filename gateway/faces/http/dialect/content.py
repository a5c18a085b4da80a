"""Prompts and messages as bodies spell them, as the contract does."""

from collections.abc import Iterable, Sequence

from gateway.faces.http.dialect.fields import MESSAGE, Handling
from protos.generated import common_pb2, gateway_pb2
from services.runtime.errors import InvalidArgument

PROMPT_KINDS = "a string, a list of strings, a list of token ids, or a list of such lists"
ROLE_ALIASES = {"developer": "system"}
REFUSED = {name: known for name, known in MESSAGE.items() if known.handling is Handling.REFUSED}


def split_prompts(prompt: object) -> Sequence[str | list[int]]:
    """Raises InvalidArgument for anything but the four kinds of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        raise InvalidArgument("prompt", "is missing")
    if not isinstance(prompt, list):
        raise InvalidArgument("prompt", f"must be {PROMPT_KINDS}")
    if not prompt:
        raise InvalidArgument("prompt", "must not be empty")
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    lists = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
    if not all(_is_token(token) for tokens in lists for token in tokens):
        raise InvalidArgument("prompt", f"must be {PROMPT_KINDS}; token ids are not negative")
    return list(lists)


def prompt_request(prompt: str | list[int]) -> gateway_pb2.GenerateRequest:
    if isinstance(prompt, str):
        return gateway_pb2.GenerateRequest(prompt=prompt)
    return gateway_pb2.GenerateRequest(prompt_tokens=common_pb2.TokenIds(ids=prompt))


def chat_messages(messages: Iterable[object]) -> list[gateway_pb2.ChatMessage]:
    """Raises InvalidArgument naming the message and what in it is wrong."""
    return [_message(f"messages[{at}]", message) for at, message in enumerate(messages)]


def unknown_in(messages: object) -> list[str]:
    """Fields of messages that nobody knows, each once."""
    if not isinstance(messages, list):
        return []
    found = (m.keys() - MESSAGE.keys() for m in messages if isinstance(m, dict))
    return [f"messages[].{name}" for name in sorted(set().union(*found))]


def _message(where: str, message: object) -> gateway_pb2.ChatMessage:
    if not isinstance(message, dict):
        raise InvalidArgument(where, "must be an object with role and content")
    for name in REFUSED.keys() & message.keys():
        if message[name] is not None and REFUSED[name].changes_answer(message[name]):
            raise InvalidArgument(f"{where}.{name}", "is not supported here")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidArgument(f"{where}.role", "must be a string")
    text = _content_text(f"{where}.content", "" if content is None else content)
    return gateway_pb2.ChatMessage(role=ROLE_ALIASES.get(role, role), content=text)


def _content_text(where: str, content: object) -> str:
    """Parts are lines of one text, as other servers join them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(where, "must be a string or a list of text parts")
    return "\n".join(_part_text(f"{where}[{at}]", part) for at, part in enumerate(content))


def _part_text(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise InvalidArgument(where, f"only parts of type 'text' are supported, not {kind!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidArgument(f"{where}.text", "must be a string")
    return text


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32
