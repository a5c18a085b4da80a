"""Refuses prompts that exceed the context by their size in bytes alone, before tokenization."""

import re
from collections.abc import Iterable

from tokenizers import Tokenizer

from gateway.types.client_request import TOKEN_ID_BYTES, ClientRequest, Conversation
from gateway.types.errors import ContextOverflow
from gateway.types.generation import ContextLimit

# Tokenizer parts that drop no text. With any other part, one token may represent any amount.
LOSSLESS = frozenset(("Sequence", "Prepend", "NFC", "Split", "Regex", "String", "ByteLevel",
                      "Digits", "Metaspace"))  # fmt: skip
REPLACE_BLANK = 'Replace(pattern=String(" "), content="▁")'
LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
NAMED = re.compile(r"([A-Z]\w+)\(")
NFC_MAX_SHRINK = 3  # NFC turns at most nine bytes into three


class PromptSizeLimit:
    """Limits the bytes of a prompt by the longest token of the model."""

    def __init__(self, tokenizer: Tokenizer):
        self.longest_token_bytes = longest_token_bytes(tokenizer)

    def check(self, request: ClientRequest, size_bytes: int, limit: ContextLimit) -> None:
        """Raises ContextOverflow if `size_bytes` cannot fit into the limit. O(1)."""
        given_ids = isinstance(request.prompt, list)
        longest = TOKEN_ID_BYTES if given_ids else self.longest_token_bytes
        truncated = request.truncate_prompt_tokens is not None
        if not longest or size_bytes <= longest * limit.tokens or truncated:
            return
        raise ContextOverflow(
            "messages" if isinstance(request.prompt, Conversation) else "prompt",
            f"This model's maximum context length is {limit.tokens} tokens. However, {size_bytes} "
            f"bytes are at least {-(-size_bytes // longest)} tokens. Please reduce the length of "
            f"the messages or completion. ({limit.tokens} tokens are what {limit.bound} can hold.)",
        )


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """Upper bound of the bytes of one token. 0 if the tokenizer drops or joins text, so that there
    is no bound. O(vocabulary)."""
    shape = f"{tokenizer.normalizer!r} {tokenizer.pre_tokenizer!r}"
    added = list(tokenizer.get_added_tokens_decoder().values())
    by_byte = "ByteLevel(" in shape
    has_bytes = by_byte or getattr(tokenizer.model, "byte_fallback", False)  # no unknown text
    if (
        not has_bytes
        or not _is_lossless(shape)
        or any(token.lstrip or token.rstrip for token in added)
    ):
        return 0
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    widest = max(map(len, vocabulary), default=0) if by_byte else _widest(vocabulary)
    shrink = NFC_MAX_SHRINK if "NFC(" in shape else 1
    return max(widest, _widest(token.content for token in added)) * shrink


def _widest(tokens: Iterable[str]) -> int:
    return max((len(token.encode()) for token in tokens), default=0)


def _is_lossless(shape: str) -> bool:
    names = NAMED.findall(LITERAL.sub("", shape.replace(REPLACE_BLANK, "")))
    return "Removed" not in shape and LOSSLESS.issuperset(names)
