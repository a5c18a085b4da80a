"""The conversation of an Anthropic body, as chat messages."""

import json
from collections.abc import Callable, Mapping, Sequence

from gateway.faces.http.dialect.content import require_text
from services.runtime.errors import InvalidArgument

Entry = dict[str, object]
Block = Mapping[str, object]

# Claude Code's first block of `system`: it differs in each request and is not for the model.
BILLING_HEADER = "x-anthropic-billing-header:"


def decode_conversation(system: object, messages: Sequence[object]) -> list[Entry]:
    """Chat messages, those of tools included. Raises InvalidArgument naming the block."""
    found: list[Entry] = []
    if system is not None:
        texts = _decode_texts("system", system)
        text = "\n".join(each for each in texts if not each.startswith(BILLING_HEADER))
        found += [{"role": "system", "content": text}] if text else []
    for at, message in enumerate(messages):
        found += _decode_message(f"messages[{at}]", message)
    return found


def _decode_message(where: str, message: object) -> list[Entry]:
    if not isinstance(message, dict):
        raise InvalidArgument(where, "must be an object with role and content")
    role, content = message.get("role"), message.get("content")
    decode = ROLES.get(role) if isinstance(role, str) else None
    if decode is None:
        raise InvalidArgument(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise InvalidArgument(f"{where}.content", "must be a string or a list of content blocks")
    return decode(f"{where}.content", blocks)


def _decode_user(where: str, blocks: Sequence[object]) -> list[Entry]:
    """Results of tools come first: they answer the calls of the message before."""
    texts: list[str] = []
    results: list[Entry] = []
    for at, given in enumerate(blocks):
        block, place = _require_block(f"{where}[{at}]", given), f"{where}[{at}]"
        match block.get("type"):
            case "text":
                texts.append(require_text(f"{place}.text", block.get("text")))
            case "tool_result":
                results.append(_decode_result(place, block))
            case kind:
                raise _unsupported(place, kind, "text and tool_result")
    said: list[Entry] = [{"role": "user", "content": "\n".join(texts)}] if texts else []
    return [*results, *said]


def _decode_assistant(where: str, blocks: Sequence[object]) -> list[Entry]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Entry] = []
    for at, given in enumerate(blocks):
        block, place = _require_block(f"{where}[{at}]", given), f"{where}[{at}]"
        match block.get("type"):
            case "text":
                texts.append(require_text(f"{place}.text", block.get("text")))
            case "tool_use":
                calls.append(_decode_call(place, block))
            case "thinking":
                thoughts.append(require_text(f"{place}.thinking", block.get("thinking")))
            case "redacted_thinking":
                pass
            case kind:
                raise _unsupported(place, kind, "text, tool_use and thinking")
    message: Entry = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _decode_system(where: str, blocks: Sequence[object]) -> list[Entry]:
    return [{"role": "system", "content": "\n".join(_decode_texts(where, list(blocks)))}]


ROLES: Mapping[str, Callable[[str, Sequence[object]], list[Entry]]] = {
    "user": _decode_user,
    "assistant": _decode_assistant,
    "system": _decode_system,
}


def _decode_call(where: str, block: Block) -> Entry:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidArgument(f"{where}.input", "must be an object")
    return {
        "id": require_text(f"{where}.id", block.get("id")),
        "type": "function",
        "function": {
            "name": require_text(f"{where}.name", block.get("name")),
            "arguments": json.dumps(given, ensure_ascii=False),
        },
    }


def _decode_result(where: str, block: Block) -> Entry:
    content = block.get("content")
    texts = _decode_texts(f"{where}.content", "" if content is None else content)
    call_id = require_text(f"{where}.tool_use_id", block.get("tool_use_id"))
    return {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}


def _decode_texts(where: str, content: object) -> list[str]:
    """The texts of a string or of text blocks."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidArgument(where, "must be a string or a list of text blocks")
    texts = []
    for at, given in enumerate(content):
        block = _require_block(f"{where}[{at}]", given)
        if block.get("type") != "text":
            raise _unsupported(f"{where}[{at}]", block.get("type"), "text")
        texts.append(require_text(f"{where}[{at}].text", block.get("text")))
    return texts


def _require_block(where: str, block: object) -> Block:
    if not isinstance(block, dict):
        raise InvalidArgument(where, "must be an object with a type")
    return block


def _unsupported(where: str, kind: object, known: str) -> InvalidArgument:
    return InvalidArgument(f"{where}.type", f"only {known} blocks are supported here, not {kind!r}")
