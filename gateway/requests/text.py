"""Between text and tokens: a model's tokenizer, its chat template and what bounds them."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from gateway.requests.incremental import Detokenizer
from gateway.requests.sampling import Sampling
from services.runtime.config import ConfigError

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")

PLAIN = Sampling(seed=0, max_tokens=1)  # its text as it is where a request says nothing of that
NONE: frozenset[int] = frozenset()


class TemplateError(ValueError):
    """A conversation that the model's chat template refuses, or a model without one."""


class Text:
    """A model's tokenizer and the facts of its config.json that bound a request.

    Raises ConfigError, one line, when the folder is missing or its files cannot be read.
    """

    def __init__(self, model: str, chat_template: str = ""):
        """`chat_template`: a file whose template stands for the model's own; empty: its own."""
        self._model = model
        self._tokenizer = _load_tokenizer(model)
        if chat_template:
            self._tokenizer.chat_template = _read_template(Path(chat_template))
        self.backend = cast(Tokenizer, self._tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        config = _read_json(Path(model) / "config.json")
        size = config.get("vocab_size")
        self.vocabulary_tokens = size if isinstance(size, int) else len(self._tokenizer)
        self.context_tokens = next(
            (v for k in CONTEXT_KEYS if isinstance(v := config.get(k), int) and v > 0), 0
        )
        added = self.backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._specials = {i: text for i, text in self._added.items() if added[i].special}
        self.eos_ids = self._read_eos_ids(config)
        self._seen_eos_ids = self.eos_ids - self._specials.keys()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens the model wants around it. A batch of one:
        other threads go on meanwhile, as they don't beside the tokenizer's `encode`."""
        (read,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(read.ids)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation up to where the assistant answers, or goes on."""
        if not self._tokenizer.chat_template:
            raise TemplateError("this model has no chat template; send a prompt instead")
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except Exception as error:  # whatever a template raises, its text is for the user
            raise TemplateError((str(error).splitlines() or ["it fails"])[0][:300]) from None
        return self.encode(cast(str, rendered), add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, sampling: Sampling = PLAIN) -> Detokenizer:
        """For one answer. The token that has ended it, the model's own or one that the request
        names, is text only where stop strings are, and it is no special one that is skipped."""
        skips = sampling.skip_special_tokens
        silent: Set[int] = NONE
        if not sampling.include_stop_str_in_output:
            seen = self._seen_eos_ids if skips else self.eos_ids
            silent = sampling.stop_token_ids | (NONE if sampling.ignore_eos else seen)
        spaced = skips or sampling.spaces_between_special_tokens
        return Detokenizer(self.backend, skips, silent, None if spaced else self._specials)

    def sequences_of(self, word: str) -> Iterator[list[int]]:
        """The tokens that spell a word where a text begins with it, and behind a space; once where
        both begin alike, as the second is then the first behind a token for the space."""
        word = word.lstrip()
        alone, spaced = (self.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
        if alone:
            yield alone
        if spaced and not (alone and (spaced[0] == alone[0] or len(spaced) != len(alone))):
            yield spaced

    def token_text(self, token_id: int) -> str:
        """A token by itself; an incomplete character reads as U+FFFD."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a single token stands for; part of a character where it is that."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        if self._byte_of is not None and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        return self.backend.decode([token_id], skip_special_tokens=False).encode()

    def _read_eos_ids(self, config: Mapping[str, Any]) -> frozenset[int]:
        """The tokens that end an answer, as a worker takes them."""
        try:
            generation = _read_json(Path(self._model) / "generation_config.json")
        except ConfigError:  # told by who reads sampling defaults there, unless it is left out
            generation = {}
        given = generation.get("eos_token_id", config.get("eos_token_id"))
        given = self._tokenizer.eos_token_id if given is None else given
        listed = given if isinstance(given, list) else [given]
        return frozenset(token for token in listed if isinstance(token, int))

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """The byte-level alphabet, for tokenizers that write in it."""
        return _byte_alphabet() if "ByteLevel" in repr(self.backend.decoder) else None


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


def _read_template(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"gateway.chat_template: {path} cannot be read: {error}") from None


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


def _read_json(path: Path) -> dict[str, Any]:
    """A model's file, empty where it has none."""
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
