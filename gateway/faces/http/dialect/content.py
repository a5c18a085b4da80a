"""Prompts and messages of HTTP bodies, as values of a ClientRequest."""

from collections.abc import Iterable, Sequence

from gateway.faces.http.dialect.fields import MESSAGE, NOT_SUPPORTED, Handling
from gateway.types.client_request import TokenIds
from services.runtime.errors import InvalidArgument

PROMPT_KINDS = "a string, a list of strings, a list of token ids, or a list of such lists"
ROLE_ALIASES = {"developer": "system"}
REFUSED = {name: rule for name, rule in MESSAGE.items() if rule.handling is Handling.REFUSED}


def split_prompts(prompt: object) -> Sequence[str | TokenIds]:
    """The prompts of one field. Raises InvalidArgument for any other kind of value."""
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
    if not all(_is_token_id(token) for tokens in lists for token in tokens):
        raise InvalidArgument("prompt", f"must be {PROMPT_KINDS}; token ids are not negative")
    return list(lists)


def decode_messages(messages: Iterable[object]) -> list[dict[str, str]]:
    """Role and content of each message. Raises InvalidArgument naming the message and the field."""
    return [_decode_message(f"messages[{at}]", message) for at, message in enumerate(messages)]


def find_unknown_fields(messages: object) -> list[str]:
    """Names of unknown fields in messages, each once."""
    if not isinstance(messages, list):
        return []
    found = (m.keys() - MESSAGE.keys() for m in messages if isinstance(m, dict))
    return [f"messages[].{name}" for name in sorted(set().union(*found))]


def _decode_message(where: str, message: object) -> dict[str, str]:
    if not isinstance(message, dict):
        raise InvalidArgument(where, "must be an object with role and content")
    for name in REFUSED.keys() & message.keys():
        if message[name] is not None and REFUSED[name].changes_answer(message[name]):
            raise InvalidArgument(f"{where}.{name}", NOT_SUPPORTED)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidArgument(f"{where}.role", "must be a string")
    text = _decode_content(f"{where}.content", "" if content is None else content)
    return {"role": ROLE_ALIASES.get(role, role), "content": text}


def _decode_content(where: str, content: object) -> str:
    """A text. As at other servers, parts become its lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(where, "must be a string or a list of text parts")
    return "\n".join(_decode_part(f"{where}[{at}]", part) for at, part in enumerate(content))


def _decode_part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise InvalidArgument(where, f"only parts of type 'text' are supported, not {kind!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidArgument(f"{where}.text", "must be a string")
    return text


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32
