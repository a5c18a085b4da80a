"""What an emulated engine reads of a model's folder: tokenizer and end tokens, no weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from services.worker.emulation.lengths import normalise
from services.worker.folder import load_tokenizer, read_eos_ids, read_json

MOST_WORDS = 4_096  # of the table of answer tokens
SHORTEST = 3  # letters of a word
INCOMPLETE = "\ufffd"  # in the text of a token that is part of a character


class Vocabulary:
    """The tokens of a model. `words` are those with a word after a space as their text, or all
    tokens with a text if there are none.

    Raises ValueError with a sentence if the folder's files cannot be used.
    """

    def __init__(self, folder: str, frame: tuple[str, str] = ("", "")):
        """`frame`: what the chat template writes before and after the last user message."""
        self._tokenizer = load_tokenizer(folder)
        config = read_json(Path(folder) / "config.json")
        size = config.get("vocab_size")
        self.size = size if isinstance(size, int) else self._tokenizer.get_vocab_size()
        self.eos_ids = read_eos_ids(folder)
        self.words = self._find_words()
        self._opening, self._closing = frame

    def texts(self, ids: Sequence[int]) -> Iterator[str]:
        """The normalised texts that a file of prompts may have for a prompt: the last user message
        if the chat template's frame is around it, then the whole text without special tokens."""
        whole = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        if self._opening and whole.endswith(self._closing):
            end = len(whole) - len(self._closing)
            begin = whole.rfind(self._opening, 0, end)
            if begin >= 0:
                yield normalise(whole[begin + len(self._opening) : end])
        yield normalise(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _find_words(self) -> Sequence[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        count = min(self.size, self._tokenizer.get_vocab_size())
        ids = [token for token in range(count) if token not in added and token not in self.eos_ids]
        # After another token, because a tokenizer may strip the first space of a text.
        start = self._tokenizer.encode("a", add_special_tokens=False).ids[:1]
        begin = len(self._tokenizer.decode(start))
        decoded = self._tokenizer.decode_batch([[*start, token] for token in ids])
        texts = [(token, text[begin:]) for token, text in zip(ids, decoded, strict=True)]
        words = [token for token, text in texts if _is_word(text)] or [
            token for token, text in texts if text.isprintable() and text and INCOMPLETE not in text
        ]
        if not words:
            raise ValueError("worker.model: no token of the tokenizer has a text of its own")
        return words[:MOST_WORDS]


def _is_word(text: str) -> bool:
    letters = text[1:]
    return text[:1] == " " and len(letters) >= SHORTEST and letters.isascii() and letters.isalpha()
