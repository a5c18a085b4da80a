"""From what a request brings, a text, token ids or a conversation, to the prompt's token ids."""

import json
from collections.abc import Mapping, Sequence

from gateway.requests.text import TemplateError, Text
from protos.generated import gateway_pb2
from services.runtime.errors import InvalidArgument

ROLES = ("system", "user", "assistant")
MAX_TEMPLATE_CHARS = 16_384  # of what a template is given beside the messages, as JSON

# What a chat template is called with, or a renderer before it: no client's to say.
RESERVED = frozenset(
    ("messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize",
     "add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "padding",
     "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
     "tokenizer_kwargs", "self", "compiled_template", "raise_exception", "strftime_now")
)  # fmt: skip


def prompt_ids(text: Text, request: gateway_pb2.GenerateRequest) -> Sequence[int]:
    """All of them, however many, from any thread. Raises InvalidArgument naming the field."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("prompt", "missing; give prompt, prompt_tokens or chat")
    ids = {"prompt": _raw, "prompt_tokens": _tokens, "chat": _chat}[kind](text, request)
    if not ids:
        raise InvalidArgument("prompt", "must not be empty")
    return ids


def cut(ids: Sequence[int], wanted: int, room: int) -> Sequence[int]:
    """The last `wanted` of them, or for -1 as many as there is room for. Raises InvalidArgument."""
    if wanted < -1 or wanted == 0:
        raise InvalidArgument(
            "truncate_prompt_tokens", f"must be at least 1, or -1 for what fits, not {wanted}"
        )
    return ids[-(wanted if wanted > 0 else max(1, room)) :]


def _raw(text: Text, request: gateway_pb2.GenerateRequest) -> Sequence[int]:
    if not request.prompt:
        return ()
    return text.encode(request.prompt, _special(request, True))


def _tokens(text: Text, request: gateway_pb2.GenerateRequest) -> Sequence[int]:
    ids, size = list(request.prompt_tokens.ids), text.vocabulary_tokens
    wrong = next((i for i in ids if i >= size), None)
    if wrong is not None:
        raise InvalidArgument("prompt", f"token id {wrong} is outside the vocabulary of {size}")
    return ids


def _chat(text: Text, request: gateway_pb2.GenerateRequest) -> Sequence[int]:
    chat = request.chat
    messages = [{"role": m.role, "content": m.content} for m in chat.messages]
    if not messages:
        raise InvalidArgument("messages", "must not be empty")
    for at, message in enumerate(messages):
        if message["role"] not in ROLES:
            known = ", ".join(ROLES)
            raise InvalidArgument(
                f"messages[{at}].role", f"unknown role {message['role']!r}; known: {known}"
            )
    if not any(message["content"] for message in messages):
        raise InvalidArgument("messages", "must not all be empty")
    goes_on, opened = chat.continue_final_message, not chat.continue_final_message
    if chat.HasField("add_generation_prompt"):
        opened = chat.add_generation_prompt
    if goes_on and opened:
        raise InvalidArgument(
            "continue_final_message", "can't be true where add_generation_prompt is"
        )
    template_kwargs = read_template_kwargs(chat.template_kwargs_json)
    try:
        special = _special(request, False)
        return text.encode_chat(messages, opened, goes_on, template_kwargs, special)
    except TemplateError as error:
        raise InvalidArgument("messages", str(error)) from None


def read_template_kwargs(content: str) -> Mapping[str, object]:
    """What a template is given beside the messages. Raises InvalidArgument."""
    if not content:
        return {}
    name = "chat_template_kwargs"
    if len(content) > MAX_TEMPLATE_CHARS:
        raise InvalidArgument(name, f"at most {MAX_TEMPLATE_CHARS} characters as JSON")
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidArgument(name, "must be a JSON object") from None
    if not isinstance(given, dict):
        raise InvalidArgument(name, "must be a JSON object")
    if taken := sorted(given.keys() & RESERVED):
        raise InvalidArgument(name, f"can't set {taken[0]}")
    return given


def _special(request: gateway_pb2.GenerateRequest, default: bool) -> bool:
    given = request.HasField("add_special_tokens")
    return request.add_special_tokens if given else default
