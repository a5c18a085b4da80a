"""The bytes of byte-level tokens, with which decoding an answer is joining bytes. Pure."""

from collections.abc import Mapping, Set

from tokenizers import Tokenizer, decoders


class ByteTokens(dict[int, bytes]):
    """The bytes of each token as its tokenizer's byte-level decoder writes them.

    Filled as tokens occur; never larger than the vocabulary.
    """

    def __init__(self, backend: Tokenizer, skipped: Set[str] = frozenset()):
        """`skipped`: the texts of tokens that are not written."""
        super().__init__()
        self._backend, self._skipped = backend, skipped

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._skipped:
            found = b""
        elif all(character in BYTE_OF for character in token):
            found = bytes(BYTE_OF[character] for character in token)
        else:  # an added token with characters outside the alphabet
            found = token.encode()
        if token is not None:
            self[token_id] = found
        return found


def is_byte_level(backend: Tokenizer) -> bool:
    """Whether the decoder does nothing but map characters to bytes."""
    return isinstance(backend.decoder, decoders.ByteLevel)


def byte_alphabet() -> Mapping[str, int]:
    """GPT-2's printable alphabet: printable bytes map to themselves, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = byte_alphabet()
