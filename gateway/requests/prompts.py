"""Token ids of a prompt: a text, token ids or a conversation."""

import json
from collections.abc import Mapping, Sequence
from typing import assert_never

from gateway.requests.text import TemplateError, Text
from gateway.types.client_request import ClientRequest, Conversation, TokenIds, text_of
from services.runtime.errors import InvalidArgument

ROLES = ("system", "user", "assistant", "tool")
MAX_TEMPLATE_CHARS = 16_384  # of template arguments as JSON
TEMPLATE_FIELD = "chat_template_kwargs"

# Arguments of a chat template, or of the code that renders it, that a client cannot set.
RESERVED = frozenset(
    ("messages", "conversation", "conversations", "tools", "documents", "chat_template", "tokenize",
     "add_generation_prompt", "continue_final_message", "sanitize_control_tokens", "padding",
     "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
     "tokenizer_kwargs", "self", "compiled_template", "raise_exception", "strftime_now")
)  # fmt: skip


def tokenize_prompt(text: Text, request: ClientRequest, keep_tokens: int = 0) -> Sequence[int]:
    """All token ids, however many; with `keep_tokens`, at least as many of the last ones. Safe in
    any thread. Raises InvalidArgument naming the field."""
    match request.prompt:
        case None:
            raise InvalidArgument("prompt", "missing; give prompt, prompt_tokens or chat")
        case str() as prompt:
            special = request.add_special_tokens is not False
            kept = text.cut(prompt, keep_tokens)
            ids: Sequence[int] = text.encode(kept, special) if kept else ()
        case Conversation() as conversation:
            ids = _render(text, conversation, request.add_special_tokens is True, keep_tokens)
        case list() as ids:
            _check_ids(text, ids)
        case unknown:
            assert_never(unknown)
    if not ids:
        raise InvalidArgument("prompt", "must not be empty")
    if text.exceeds_vocabulary:
        _check_tokens(text, ids)
    return ids


def count_kept_tokens(given: int | None, room_tokens: int) -> int:
    """The number of the last tokens that `truncate_prompt_tokens` keeps: `room_tokens` for -1; 0
    without it, for all. Raises InvalidArgument."""
    if given is None:
        return 0
    if given < -1 or given == 0:
        message = f"must be at least 1, or -1 for as many as fit, not {given}"
        raise InvalidArgument("truncate_prompt_tokens", message)
    return given if given > 0 else max(1, room_tokens)


def parse_template_kwargs(content: str) -> Mapping[str, object]:
    """Template arguments from JSON; an empty text has none. Raises InvalidArgument."""
    if not content:
        return {}
    check_template_size(content)
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidArgument(TEMPLATE_FIELD, "must be a JSON object") from None
    if not isinstance(given, dict):
        raise InvalidArgument(TEMPLATE_FIELD, "must be a JSON object")
    return given


def check_template_size(content: str) -> None:
    """Raises InvalidArgument if template arguments are too long as JSON."""
    if len(content) > MAX_TEMPLATE_CHARS:
        raise InvalidArgument(TEMPLATE_FIELD, f"at most {MAX_TEMPLATE_CHARS} characters as JSON")


def _check_ids(text: Text, ids: TokenIds) -> None:
    size = text.vocabulary_tokens
    wrong = next((token for token in ids if token >= size), None)
    if wrong is not None:
        raise InvalidArgument("prompt", f"token id {wrong} is outside the vocabulary of {size}")


def _check_tokens(text: Text, ids: Sequence[int]) -> None:
    size = text.vocabulary_tokens
    wrong = next((token for token in ids if token >= size), None)
    if wrong is not None:
        message = f"has {text.token_text(wrong)!r}, which the model has no embedding for"
        raise InvalidArgument("prompt", message)


def _render(
    text: Text, conversation: Conversation, add_special_tokens: bool, keep_tokens: int
) -> Sequence[int]:
    messages = conversation.messages
    if not messages:
        raise InvalidArgument("messages", "must not be empty")
    for at, message in enumerate(messages):
        if message["role"] not in ROLES:
            known = ", ".join(ROLES)
            fault = f"unknown role {message['role']!r}; known: {known}"
            raise InvalidArgument(f"messages[{at}].role", fault)
    if not any(text_of(message) or message.get("tool_calls") for message in messages):
        raise InvalidArgument("messages", "must not all be empty")
    continued, opened = conversation.continue_final_message, conversation.add_generation_prompt
    opened = not continued if opened is None else opened
    if continued and opened:
        fault = "cannot be true if add_generation_prompt is true"
        raise InvalidArgument("continue_final_message", fault)
    if reserved := sorted(conversation.template_kwargs.keys() & RESERVED):
        raise InvalidArgument(TEMPLATE_FIELD, f"cannot set {reserved[0]}")
    try:
        return text.encode_chat(
            messages,
            opened,
            continued,
            conversation.template_kwargs,
            add_special_tokens,
            conversation.tools,
            keep_tokens,
        )
    except TemplateError as error:
        raise InvalidArgument("messages", str(error)) from None
