"""What is too long by its bytes alone: said before a byte of it is tokenized."""

import re
from collections.abc import Iterable

from tokenizers import Tokenizer

from gateway.requests.errors import ContextOverflow
from gateway.requests.parser import Reach
from protos.generated import gateway_pb2

# Parts of a tokenizer that drop no text; with others among them a token may stand for any amount.
KEEP = frozenset(("Sequence", "Prepend", "NFC", "Split", "Regex", "String", "ByteLevel", "Digits",
                  "Metaspace"))  # fmt: skip
BLANK_SPELLED = 'Replace(pattern=String(" "), content="▁")'
LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
NAMED = re.compile(r"([A-Z]\w+)\(")
TOKEN_ID_BYTES = 4
NFC_SHRINKS = 3  # at most: three bytes stand for nine


class Sizes:
    """How many bytes the longest token of a model stands for, and so what a prompt may have."""

    def __init__(self, tokenizer: Tokenizer):
        self.longest_token_bytes = longest_token_bytes(tokenizer)

    def check(self, request: gateway_pb2.GenerateRequest, size_bytes: int, reach: Reach) -> None:
        """Raises InvalidArgument for a prompt of so many bytes that can't be as few tokens as there
        is room for. O(1)."""
        kind = request.WhichOneof("input")
        longest = TOKEN_ID_BYTES if kind == "prompt_tokens" else self.longest_token_bytes
        if not longest or size_bytes <= longest * reach.tokens or _is_cut(request):
            return
        raise ContextOverflow(
            "messages" if kind == "chat" else "prompt",
            f"This model's maximum context length is {reach.tokens} tokens. However, {size_bytes} "
            f"bytes are at least {-(-size_bytes // longest)} tokens. Please reduce the length of "
            f"the messages or completion. ({reach.tokens} tokens are what {reach.bound} can hold.)",
        )


def text_bytes(request: gateway_pb2.GenerateRequest) -> int:
    """Of what is to be tokenized, but for blanks around a message, which templates cut off."""
    if request.WhichOneof("input") == "chat":
        return sum(len(message.content.strip().encode()) for message in request.chat.messages)
    return len(request.prompt.encode()) or TOKEN_ID_BYTES * len(request.prompt_tokens.ids)


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """An upper bound; 0 where a token may stand for any number of them, since the tokenizer drops
    or joins something. O(vocabulary)."""
    shape = f"{tokenizer.normalizer!r} {tokenizer.pre_tokenizer!r}"
    added = list(tokenizer.get_added_tokens_decoder().values())
    by_byte = "ByteLevel(" in shape
    spelled = by_byte or getattr(tokenizer.model, "byte_fallback", False)  # what is unknown, too
    if not spelled or not _keeps_all(shape) or any(token.lstrip or token.rstrip for token in added):
        return 0
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    widest = max(map(len, vocabulary), default=0) if by_byte else _widest(vocabulary)
    shrinks = NFC_SHRINKS if "NFC(" in shape else 1
    return max(widest, _widest(token.content for token in added)) * shrinks


def _widest(tokens: Iterable[str]) -> int:
    return max((len(token.encode()) for token in tokens), default=0)


def _keeps_all(shape: str) -> bool:
    names = NAMED.findall(LITERAL.sub("", shape.replace(BLANK_SPELLED, "")))
    return "Removed" not in shape and KEEP.issuperset(names)


def _is_cut(request: gateway_pb2.GenerateRequest) -> bool:
    """Whether only a part of it is kept, so that its length is no fault."""
    return request.HasField("truncate_prompt_tokens")
