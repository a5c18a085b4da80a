"""The items of a response's input and output, as chat messages."""

import json
from collections.abc import Callable, Mapping
from secrets import token_hex

from gateway.faces.http.dialect.content import require_text
from services.runtime.errors import InvalidArgument

Entry = dict[str, object]
Item = Mapping[str, object]

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
ID_PREFIXES = {
    "message": "msg_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "reasoning": "rs_",
}
ID_BYTES = 12  # random ones of an item without an id
STATELESS = "is not supported; send the item itself, or previous_response_id"


def name_items(given: object) -> list[Entry]:
    """The items of a decoded input as clients list them: each with a type, an id and parts."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    assert isinstance(items, list)
    return [_name_item(item) for item in items]


def _name_item(item: Item) -> Entry:
    kind = str(item.get("type", "message"))
    made = {"type": kind, "id": f"{ID_PREFIXES[kind]}{token_hex(ID_BYTES)}", "status": "completed"}
    named: Entry = {**made, **{name: value for name, value in item.items() if value is not None}}
    text = item.get("content")
    if kind == "message" and isinstance(text, str):
        said = item.get("role") == "assistant"
        answer = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        named["content"] = [answer if said else {"type": "input_text", "text": text}]
    return named


def decode_input(given: object, where: str = "input") -> list[Entry]:
    """Chat messages, those of tools included. Raises InvalidArgument naming the item."""
    if given is None:
        raise InvalidArgument(where, "is missing")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidArgument(where, "must be a string or a list of items")
    conversation = _Conversation()
    for at, item in enumerate(given):
        place = f"{where}[{at}]"
        if not isinstance(item, dict):
            raise InvalidArgument(place, "must be an object")
        kind = item.get("type", "message")
        decode = ITEMS.get(kind) if isinstance(kind, str) else None
        if decode is None:
            sentence = f"must be one of {', '.join(ITEMS)}, not {kind!r}"
            raise InvalidArgument(f"{place}.type", sentence)
        decode(conversation, place, item)
    return conversation.messages


class _Conversation:
    """Messages so far. Items of one answer become one message of the assistant."""

    def __init__(self) -> None:
        self.messages: list[Entry] = []
        self._answer: Entry | None = None  # open for further items

    def say(self, role: str, text: str) -> None:
        if role != "assistant":
            self._add({"role": role, "content": text})
        elif self._answer is None or "tool_calls" in self._answer or self._answer["content"]:
            self._answer = self._add({"role": role, "content": text})
        else:
            self._answer["content"] = text

    def think(self, text: str) -> None:
        if text:
            thought = {"content": "", "reasoning_content": text}
            self._answer = self._add({"role": "assistant", **thought})

    def call(self, call_id: str, name: str, arguments: str) -> None:
        answer = self._answer
        if answer is None:
            self._answer = answer = self._add({"role": "assistant", "content": ""})
        function = {"name": name, "arguments": arguments}
        calls = answer.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"id": call_id, "type": "function", "function": function})

    def result(self, call_id: str, text: str) -> None:
        self._add({"role": "tool", "tool_call_id": call_id, "content": text})

    def _add(self, message: Entry) -> Entry:
        self._answer = None
        self.messages.append(message)
        return message


def _decode_message(conversation: _Conversation, where: str, item: Item) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidArgument(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    conversation.say(str(role), decode_texts(f"{where}.content", item.get("content")))


def _decode_reasoning(conversation: _Conversation, where: str, item: Item) -> None:
    """The text of the reasoning, else of its summary; what is only encrypted is left out."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if isinstance(parts, list) and parts:
            texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
            joined = [require_text(f"{where}.{name}[{n}].text", t) for n, t in enumerate(texts)]
            conversation.think("\n".join(joined))
            return


def _decode_call(conversation: _Conversation, where: str, item: Item) -> None:
    arguments = require_text(f"{where}.arguments", item.get("arguments"))
    try:
        valid = isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        valid = False
    if not valid:
        raise InvalidArgument(f"{where}.arguments", "must be the text of a JSON object")
    call_id = require_text(f"{where}.call_id", item.get("call_id"))
    conversation.call(call_id, require_text(f"{where}.name", item.get("name")), arguments or "{}")


def _decode_result(conversation: _Conversation, where: str, item: Item) -> None:
    call_id = require_text(f"{where}.call_id", item.get("call_id"))
    conversation.result(call_id, decode_texts(f"{where}.output", item.get("output")))


def _refuse_reference(conversation: _Conversation, where: str, item: Item) -> None:
    raise InvalidArgument(f"{where}.type", f"'item_reference' {STATELESS}")


ITEMS: Mapping[str, Callable[[_Conversation, str, Item], None]] = {
    "message": _decode_message,
    "function_call": _decode_call,
    "function_call_output": _decode_result,
    "reasoning": _decode_reasoning,
    "item_reference": _refuse_reference,
}


def decode_texts(where: str, content: object) -> str:
    """The text of a string or of text parts, which become lines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fault = "is missing" if content is None else "must be a string or a list of parts"
        raise InvalidArgument(where, fault)
    texts: list[str] = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str) or kind not in TEXT_PARTS:
            fault = f"only text parts are supported, not {kind!r}"
            raise InvalidArgument(f"{where}[{at}].type", fault)
        name = TEXT_PARTS[kind]
        texts.append(require_text(f"{where}[{at}].{name}", part.get(name)))
    return "\n".join(texts)
