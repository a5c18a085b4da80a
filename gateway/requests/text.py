"""A model's tokenizer, chat template and context size."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from gateway.requests.byte_tokens import BYTE_OF, ByteTokens, is_byte_level
from gateway.requests.incremental import AnswerDetokenizer, ByteDetokenizer, Detokenizer
from gateway.requests.suffix import SuffixCutter
from gateway.types.client_request import Message
from gateway.types.generation import Sampling
from gateway.types.tools import Tool
from services.runtime.config import ConfigError
from services.runtime.refusals.folder import find_tokenizer_fault, has_only_tekken
from services.runtime.tekken import EXTRA, load_tekken

PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")

PLAIN = Sampling(seed=0, max_tokens=1)  # default text options
NONE: frozenset[int] = frozenset()
NO_TEMPLATE = "this model has no chat template; send a prompt instead"
NO_TEKKEN_TEMPLATE = f", or give the server one by --chat-template, or let it make one: {EXTRA}"


class TemplateError(ValueError):
    """The chat template rejects a conversation, or the model has no template."""


class Text:
    """A model's tokenizer and the limits in its config.json.

    Raises ConfigError if the folder is missing or a file cannot be read.
    """

    def __init__(self, model: str, chat_template: str = ""):
        """`chat_template`: file of a template that replaces the model's; empty: the model's."""
        self._model = model
        self._only_tekken = Path(model).is_dir() and has_only_tekken(Path(model))
        self._tokenizer = _load_tekken(model) if self._only_tekken else _load_tokenizer(model)
        if chat_template:
            self._tokenizer.chat_template = _read_template(Path(chat_template))
        self.chat_template = _join_templates(self._tokenizer.chat_template)
        response = getattr(self._tokenizer, "response_template", None)
        self.response_template: Mapping[str, object] | None = response
        self.backend = cast(Tokenizer, self._tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self._cutter = SuffixCutter(self.backend)
        config = _text_config(read_json(Path(model) / "config.json"))
        size = config.get("vocab_size")
        self.vocabulary_tokens = size if isinstance(size, int) else len(self._tokenizer)
        _require_vocabulary(model, self.backend, self.vocabulary_tokens)
        # Whether a text can have tokens without an embedding, such as those of images.
        self.exceeds_vocabulary = self.backend.get_vocab_size() > self.vocabulary_tokens
        # Above all ids that an answer can have: some workers count added tokens, too.
        self.all_tokens = max(self.vocabulary_tokens, self.backend.get_vocab_size())
        self.context_tokens = next(
            (v for k in CONTEXT_KEYS if isinstance(v := config.get(k), int) and v > 0), 0
        )
        added = self.backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._specials = {i: text for i, text in self._added.items() if added[i].special}
        self._byte_tokens: Mapping[bool, ByteTokens] = {}  # by skip_special_tokens
        if is_byte_level(self.backend):
            specials = frozenset(self._specials.values())
            plain, skipping = ByteTokens(self.backend), ByteTokens(self.backend, specials)
            self._byte_tokens = {False: plain, True: skipping}
        self.eos_ids = self._read_eos_ids(config)
        self.special_texts = frozenset(self._specials.values())
        self._visible_eos_ids = self.eos_ids - self._specials.keys()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the model puts around it. Uses a batch
        of one because `encode_batch`, unlike `encode`, releases the GIL."""
        (read,) = self.backend.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(read.ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
        add_special_tokens: bool = False,
        tools: Sequence[Tool] = (),
        keep_tokens: int = 0,
    ) -> list[int]:
        """Token ids of a conversation, up to the assistant's answer or its continuation; with
        `keep_tokens`, at least as many of the last ones."""
        if not self._tokenizer.chat_template:
            raise TemplateError(NO_TEMPLATE + NO_TEKKEN_TEMPLATE * self._only_tekken)
        try:
            rendered = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=[tool.shown for tool in tools] or None,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template may raise anything; the user needs its message
            raise TemplateError(
                (str(error).splitlines() or ["the chat template failed"])[0][:300]
            ) from None
        return self.encode(self.cut(cast(str, rendered), keep_tokens), add_special_tokens)

    def cut(self, text: str, keep_tokens: int) -> str:
        """The end of a text, with the same last `keep_tokens` tokens; for 0 all of it. Raises
        InvalidArgument."""
        return self._cutter.cut(text, keep_tokens) if keep_tokens else text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(self, sampling: Sampling = PLAIN) -> AnswerDetokenizer:
        """The detokenizer of one answer. The token that ends it, the model's or one of the request,
        is text only with `include_stop_str_in_output`, and not if it is a skipped special token."""
        skip = sampling.skip_special_tokens
        silent: Set[int] = NONE
        if not sampling.include_stop_str_in_output:
            visible = self._visible_eos_ids if skip else self.eos_ids
            silent = sampling.stop_token_ids | (NONE if sampling.ignore_eos else visible)
        spaced = skip or sampling.spaces_between_special_tokens
        if spaced and self._byte_tokens:
            return ByteDetokenizer(self._byte_tokens[skip], silent)
        return Detokenizer(self.backend, skip, silent, None if spaced else self._specials)

    def split_specials(self, text: str) -> list[str | int]:
        """The text in pieces, with special tokens as their ids. O(special tokens)."""
        pieces: list[str | int] = [text]
        for token_id, special in self._specials.items():
            pieces = [
                part
                for piece in pieces
                for part in (
                    _split(piece, special, token_id) if isinstance(piece, str) else (piece,)
                )
            ]
        return pieces

    def spell_word(self, word: str) -> Iterator[list[int]]:
        """Token sequences of a word at the start of a text and after a space. One sequence if the
        second is the first after a token for the space."""
        word = word.lstrip()
        alone, spaced = (self.encode(text, add_special_tokens=False) for text in (word, f" {word}"))
        if alone:
            yield alone
        if spaced and not (alone and (spaced[0] == alone[0] or len(spaced) != len(alone))):
            yield spaced

    def token_text(self, token_id: int) -> str:
        """The text of one token; an incomplete character is U+FFFD."""
        return self.backend.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be part of a character."""
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
        """The tokens that end an answer, read as the worker reads them."""
        try:
            generation = read_json(Path(self._model) / "generation_config.json")
        except ConfigError:  # reported when the sampling defaults are read
            generation = {}
        given = generation.get("eos_token_id", config.get("eos_token_id"))
        given = self._tokenizer.eos_token_id if given is None else given
        listed = given if isinstance(given, list) else [given]
        return frozenset(token for token in listed if isinstance(token, int))

    @cached_property
    def _byte_of(self) -> Mapping[str, int] | None:
        """Byte of each character of the byte-level alphabet, for tokenizers that use it."""
        return BYTE_OF if "ByteLevel" in repr(self.backend.decoder) else None


def _split(text: str, special: str, token_id: int) -> Iterator[str | int]:
    """The parts of a text between a special token, and its id between them."""
    first, *others = text.split(special)
    if first:
        yield first
    for part in others:
        yield token_id
        if part:
            yield part


def _join_templates(given: object) -> str:
    """The text of a chat template, or of several that a model has for different purposes."""
    if isinstance(given, Mapping):
        return "\n".join(map(str, given.values()))
    return given if isinstance(given, str) else ""


def _load_tekken(model: str) -> Any:
    if fault := find_tokenizer_fault(Path(model)):
        raise ConfigError(f"gateway.model: {model} {fault}")
    try:
        return load_tekken(Path(model))
    except ValueError as error:
        raise ConfigError(f"gateway.model: {error}") from None


def _load_tokenizer(model: str) -> Any:
    is_path = model.startswith((".", os.sep)) or model.count(os.sep) > 1
    is_path |= os.sep in model and model.startswith("models")
    if is_path and not Path(model).exists():
        raise ConfigError(
            "gateway.model: the folder does not exist; pass a model's folder or its name on the "
            f"hub (got {model!r})"
        )
    if Path(model).is_dir() and (fault := find_tokenizer_fault(Path(model))):
        raise ConfigError(f"gateway.model: {model} {fault}")
    kind = read_json(Path(model) / "tokenizer_config.json").get("tokenizer_class")
    try:
        tokenizer = _read_tokenizer(model, kind)
    except Exception as error:  # of many types; the first line names what is missing
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"gateway.model: no usable tokenizer in {model}: {reason}") from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"gateway.model: {model} has no tokenizer.json that tokenizers can run")
    return tokenizer


def _require_vocabulary(model: str, backend: Tokenizer, vocabulary_tokens: int) -> None:
    """Raises ConfigError for a tokenizer without tokens, or of another model. Tokens that were
    added to a vocabulary may exceed the model's."""
    if not backend.encode("Hello").ids:
        raise ConfigError(
            f"gateway.model: the tokenizer in {model} turns a text into no tokens: copy the files "
            "of the tokenizer from the original checkpoint"
        )
    tokens = backend.get_vocab_size(with_added_tokens=False)
    if tokens > vocabulary_tokens:
        raise ConfigError(
            f"gateway.model: the tokenizer in {model} has {tokens} tokens, but the model only "
            f"{vocabulary_tokens} (vocab_size in config.json): copy the files of this model's own "
            "tokenizer"
        )


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config. Its text part, if it has a separate one, fills what is missing."""
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, dict) else config


def _read_tokenizer(model: str, kind: object) -> Any:
    """Only a tokenizer with a custom class needs AutoTokenizer. Its import of torch takes seconds
    and hundreds of megabytes."""
    if kind in PLAIN_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model)
    from transformers import AutoTokenizer

    # With mistral-common, tekken.json would come before tokenizer.json, without a fast tokenizer.
    return AutoTokenizer.from_pretrained(model, mistral_format=False)


def _read_template(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"gateway.chat_template: {path} cannot be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the model; empty if it does not exist."""
    try:
        content = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"gateway.model: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"gateway.model: {path} is not a JSON object")
    return content
