"""The end of a text that suffices for its last tokens. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from gateway.requests.size import longest_token_bytes
from services.runtime.errors import InvalidArgument

# Places at which the pre-tokenizers below begin a new piece, whatever is around them.
CUT = re.compile(r"[0-9A-Za-z](?=[ \t\r\n.,;:!?])")
SEARCHED_CHARS = 4096  # at a time, for the last place
MAX_UNCUT_CHARS = 2**20  # beyond the tokens that are kept: about 1 s of a thread
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEMO = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]|\s"
PATTERNS = frozenset((GPT_2, CL100K, QWEN, O200K, DEMO))


class SuffixCutter:
    """Cuts off the beginning of texts of which only the last tokens are kept.

    Tokens do not cross the pieces of a pre-tokenizer, so a text that is cut between two pieces has
    the last tokens of the whole text. Texts of a tokenizer with an unknown pre-tokenizer stay
    whole.
    """

    def __init__(self, backend: Tokenizer):
        self._longest = longest_token_bytes(backend)
        self._cuts = self._longest > 0 and _begins_pieces_at_cuts(backend)

    def cut(self, text: str, keep_tokens: int) -> str:
        """The end of `text`, with the same last `keep_tokens` tokens. Raises InvalidArgument if it
        is far longer than these can be. O(text) without a place to cut, else O(keep_tokens)."""
        if not self._longest:
            return text
        kept_chars = keep_tokens * self._longest  # each has at least one byte
        at = self._last_cut(text, len(text) - kept_chars) if self._cuts else 0
        if len(text) - at > kept_chars + MAX_UNCUT_CHARS:
            message = (
                f"the prompt has {len(text)} characters, and its last {keep_tokens} tokens cannot "
                "be told from its end alone; send a shorter prompt"
            )
            raise InvalidArgument("truncate_prompt_tokens", message)
        return text[at:]

    @staticmethod
    def _last_cut(text: str, until: int) -> int:
        """The last place to cut at or before `until`; 0 if there is none."""
        while until > 0:
            since = max(0, until - SEARCHED_CHARS)
            places = [found.end() for found in CUT.finditer(text, since, until + 1)]
            if places:
                return places[-1]
            until = since
        return 0


def _begins_pieces_at_cuts(backend: Tokenizer) -> bool:
    added = backend.get_added_tokens_decoder().values()
    if any(token.single_word or CUT.search(token.content) for token in added):
        return False
    if backend.pre_tokenizer is None:
        return False
    state: Mapping[str, Any] = json.loads(backend.pre_tokenizer.__getstate__())
    parts = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    return all(map(_is_known, parts)) and any(map(_splits, parts))


def _is_known(part: Mapping[str, Any]) -> bool:
    match part:
        case {"type": "Split", "pattern": {"Regex": str() as pattern}}:
            return pattern in PATTERNS and part["behavior"] == "Isolated" and not part["invert"]
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return True
        case _:
            return False


def _splits(part: Mapping[str, Any]) -> bool:
    return part["type"] == "Split" or bool(part["use_regex"])
