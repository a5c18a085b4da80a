"""Prompts and messages of HTTP bodies, as values of a ClientRequest."""

from collections.abc import Iterable, Sequence

from gateway.faces.http.dialect.fields import MESSAGE, NOT_SUPPORTED, Handling
from gateway.faces.http.dialect.tools import read_calls
from gateway.types.client_request import TokenIds
from services.runtime.errors import InvalidArgument

PROMPT_KINDS = "a string, a list of strings, a list of token ids, or a list of such lists"
ROLE_ALIASES = {"developer": "system"}
ASSISTANT, TOOL = "assistant", "tool"
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


def decode_messages(messages: Iterable[object]) -> list[dict[str, object]]:
    """The messages as chat templates read them. Raises InvalidArgument naming the place."""
    decoded = [_decode_message(f"messages[{at}]", message) for at, message in enumerate(messages)]
    _check_results(decoded)
    return decoded


def _check_results(messages: Sequence[dict[str, object]]) -> None:
    """Raises InvalidArgument for the result of a call that no earlier message has."""
    known: set[object] = set()
    for at, message in enumerate(messages):
        calls = message.get("tool_calls")
        known.update(call["id"] for call in (calls if isinstance(calls, list) else ()))
        call_id = message.get("tool_call_id")
        if call_id is not None and call_id not in known:
            raise InvalidArgument(
                f"messages[{at}].tool_call_id",
                f"{str(call_id)[:80]!r} is not the id of a call in an earlier message",
            )


def require_text(where: str, text: object) -> str:
    """The value, if it is a text. Raises InvalidArgument."""
    if not isinstance(text, str):
        raise InvalidArgument(where, "is missing" if text is None else "must be a string")
    return text


def find_unknown_fields(messages: object) -> list[str]:
    """Names of unknown fields in messages, each once."""
    if not isinstance(messages, list):
        return []
    found = (m.keys() - MESSAGE.keys() for m in messages if isinstance(m, dict))
    return [f"messages[].{name}" for name in sorted(set().union(*found))]


def _decode_message(where: str, message: object) -> dict[str, object]:
    if not isinstance(message, dict):
        raise InvalidArgument(where, "must be an object with role and content")
    for name in REFUSED.keys() & message.keys():
        if message[name] is not None and REFUSED[name].changes_answer(message[name]):
            raise InvalidArgument(f"{where}.{name}", NOT_SUPPORTED)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidArgument(f"{where}.role", "must be a string")
    text = _decode_content(f"{where}.content", "" if content is None else content)
    decoded: dict[str, object] = {"role": ROLE_ALIASES.get(role, role), "content": text}
    if role == TOOL:
        decoded |= _decode_result(where, message)
    if role == ASSISTANT:
        decoded |= _decode_answer(where, message)
    return decoded


def _decode_result(where: str, message: dict[str, object]) -> dict[str, object]:
    """What the result of a call has besides its text."""
    call_id, name = message.get("tool_call_id"), message.get("name")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidArgument(
            f"{where}.tool_call_id", "is missing; it must be the id of the call that it answers"
        )
    named = {"name": name} if isinstance(name, str) and name else {}
    return {"tool_call_id": call_id, **named}


def _decode_answer(where: str, message: dict[str, object]) -> dict[str, object]:
    """What an earlier answer has besides its text."""
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    more: dict[str, object] = {}
    if calls is not None and calls != []:
        more["tool_calls"] = read_calls(f"{where}.tool_calls", calls)
    if isinstance(reasoning, str):
        more["reasoning_content"] = reasoning
    return more


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
