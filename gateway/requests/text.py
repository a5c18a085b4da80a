"""Between text and tokens: tokenizer, chat template, incremental detokenizer, stop strings."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from services.runtime.config import ConfigError

log = logging.getLogger(__name__)

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")


class TemplateError(ValueError):
    """A conversation that the model's chat template refuses, or a model without one."""


class Text:
    """A model's tokenizer and the facts of its config.json that bound a request.

    Raises ConfigError, one line, when the folder is missing or its files cannot be read.
    """

    def __init__(self, model: str):
        self._model = model
        self._tokenizer = _load_tokenizer(model)
        self.backend = cast(Tokenizer, self._tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        config = _read_config(Path(model))
        size = config.get("vocab_size")
        self.vocabulary_tokens = size if isinstance(size, int) else len(self._tokenizer)
        self.context_tokens = next(
            (v for k in CONTEXT_KEYS if isinstance(v := config.get(k), int) and v > 0), 0
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the special tokens the model wants around it."""
        return list(self.backend.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant answers."""
        if not self._tokenizer.chat_template:
            raise TemplateError("this model has no chat template; send a prompt instead")
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # whatever a template raises, its text is for the user
            raise TemplateError(str(error).splitlines()[0][:300]) from None
        return list(self.backend.encode(cast(str, rendered), add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=True)

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self.backend)

    def token_text(self, token_id: int) -> str:
        """A token by itself; an incomplete character reads as U+FFFD."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a single token stands for; part of a character where it is that."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._specials:
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        if self._byte_of is not None and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    @cached_property
    def _specials(self) -> frozenset[str]:
        return frozenset(t.content for t in self.backend.get_added_tokens_decoder().values())

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """The byte-level alphabet, for tokenizers that write in it."""
        return _byte_alphabet() if "ByteLevel" in repr(self.backend.decoder) else None


class Detokenizer:
    """Turns one answer's tokens into text as they come, never splitting a character.

    What `feed` and `flush` return, joined, is the decoding of all tokens fed.
    """

    def __init__(self, backend: Tokenizer):
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._emitted_chars = 0
        self._complete = True

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain; empty while a character is incomplete."""
        ids = list(token_ids)
        self._tokens += ids
        try:
            text = self._stream.step(self._backend, ids)
        except Exception:  # the decoding of all is not an extension of its parts
            log.warning("incremental decoding lost its place; starting anew")
            return self._restart()
        self._complete = text is not None
        if text is None:
            return ""
        self._emitted_chars += len(text)
        return text

    def flush(self) -> str:
        """The rest, at the end of the answer: a last incomplete character is U+FFFD."""
        if self._complete:
            return ""
        whole = self._backend.decode(self._tokens, skip_special_tokens=True)
        rest = whole[self._emitted_chars :]
        self._emitted_chars, self._complete = len(whole), True
        return rest

    def _restart(self) -> str:
        self._complete = False
        rest = self.flush()
        self._stream = DecodeStream(ids=self._tokens[-8:], skip_special_tokens=True)
        return rest


class StopMatcher:
    """Finds the first stop string to be completed, holding back what may be its beginning.

    What it finds does not depend on how the text is cut: it is what reading one character at a
    time would find; of two completed by the same character, the longer counts.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """The text that is safe to send, and whether a stop string was found behind it."""
        text = self._held + text
        ends = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        keep = max(_overlap(text, s) for s in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, when the answer ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest proper prefix of `stop` that `text` ends with; O(len(stop))."""
    longest = min(len(stop) - 1, len(text))
    return next((k for k in range(longest, 0, -1) if text.endswith(stop[:k])), 0)


def _load_tokenizer(model: str) -> Any:
    if (os.sep in model or model.startswith(".")) and not Path(model).exists():
        folders = model.count(os.sep) > 1 or model.startswith((".", os.sep, "models"))
        if folders:
            raise ConfigError(f"gateway.model: there is no folder {model}")
    try:
        tokenizer = _loader(Path(model))(model)
    except Exception as error:  # any of a dozen types; the first line says what is missing
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"gateway.model: no usable tokenizer in {model}: {reason}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"gateway.model: {model} has no tokenizer.json that tokenizers can run")
    return tokenizer


def _loader(folder: Path) -> Callable[[str], Any]:
    """A plain tokenizer is loaded as what it is. Only one with a class of its own needs the
    machinery that finds it, which imports torch, seconds and hundreds of megabytes of it."""
    stated = folder / "tokenizer_config.json"
    kind = json.loads(stated.read_text()).get("tokenizer_class") if stated.exists() else None
    if kind in PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return cast(Callable[[str], Any], PreTrainedTokenizerFast.from_pretrained)
    from transformers import AutoTokenizer

    return cast(Callable[[str], Any], AutoTokenizer.from_pretrained)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"gateway.model: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"gateway.model: {path} is not a JSON object")
    return content


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: bytes that print are themselves, others follow U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
