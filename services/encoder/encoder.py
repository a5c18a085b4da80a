"""Sentence encoder: text to unit vectors on the CPU in bounded time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertModel, PreTrainedModel

from services.encoder.bert import Int8Bert
from services.encoder.layers import LAYERS
from services.encoder.source import (
    DEFAULT_NAME,
    Pool,
    find_folder,
    find_pool,
    without_progress_bar,
)

Matrix = NDArray[np.float32]
Rows = Sequence[Sequence[int]]  # token ids per text
States = Callable[[Rows], list[Tensor]]  # → [layers, tokens, dim] per text

# English has four to five characters per token, code with its spaces up to eight.
CHARS_PER_TOKEN = 8
# The start of a prompt states its task. 64 tokens take 20 ms, 128 take 30 to 48 ms. The median
# prompt has 16 to 40 tokens and is read completely.
CAP_TOKENS = 64
PASS_TOKENS = 1_024  # per forward pass: activations stay in cache
AGREEMENT = 0.98  # minimum cosine similarity of INT8 and fp32 states
_PROBE = "Name three reasons why the sky is blue, then write them as a poem in C++ comments."
_MAX_REASON_CHARS = 300


class Encoder:
    """Encodes any text; thread-safe.

    `broken` counts rows with NaN or infinite values (returned as zeros), `tokens` the tokens that
    went through the model. `precision` is "int8" for BERT models that INT8 represents accurately on
    this processor, else "fp32".
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: PreTrainedModel,
        pool: Pool,
        cap: int,
        threads: int,
        exact: bool = False,
    ):
        """Takes loaded parts; `load` loads them. Changes the tokenizer's truncation."""
        positions = getattr(model.config, "max_position_embeddings", cap + 2)
        self.cap_tokens = min(cap, positions - 2)  # RoBERTa's positions start at 2
        self.head_chars = self.cap_tokens * CHARS_PER_TOKEN
        self.broken = self.tokens = 0
        self._tokenizer, self._pool, self._threads = tokenizer, pool, threads
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.cap_tokens)
        self._specials = tokenizer.num_special_tokens_to_add(False)
        self._states, self.precision = (_Padded(model), "fp32") if exact else self._choose(model)
        self.dim = self._vectors([self.token_ids(_PROBE)]).shape[-1]

    @classmethod
    def load(
        cls,
        name: str = DEFAULT_NAME,
        cap_tokens: int = CAP_TOKENS,
        threads: int = 1,
        exact: bool = False,
    ) -> "Encoder":
        """Loads the packaged default, a folder, or a Hub id of a transformers encoder.

        threads: per call. The default is one, because more threads compete with other services for
        cores. exact: fp32 even where INT8 agrees with it. Raises ValueError with the reason and
        the choices.
        """
        if cap_tokens < 8 or threads < 1:
            raise ValueError(
                f"an encoder needs cap_tokens >= 8 and threads >= 1, got {cap_tokens} and {threads}"
            )
        try:
            folder = find_folder(name)
            tokenizer, model = _load_tokenizer(folder), _load_model(folder)
            if tokenizer.get_vocab_size() > model.config.vocab_size:
                raise ValueError("its tokenizer has a larger vocabulary than its model")
            pool = find_pool(folder, name, model)
            return cls(tokenizer, model, pool, cap_tokens, threads, exact)
        except Exception as error:  # from transformers, tokenizers or the Hub
            reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
            raise ValueError(
                f"cannot load encoder {name!r}: {reason}. Give {DEFAULT_NAME!r}, a folder with a "
                "transformers encoder and its tokenizer, or such a model's id on the Hub"
            ) from error

    def encode(self, texts: Sequence[str]) -> Matrix:
        """Returns [n, LAYERS, dim] of unit length, the sentence embedding last.

        Rows are zero for a text without tokens, for non-finite values, and for missing layers.
        Only the first `head_chars` characters of a text are read, and of these `cap_tokens` tokens.
        """
        out = np.zeros((len(texts), LAYERS, self.dim), np.float32)
        rows = [self.token_ids(text) for text in texts]
        filled = [i for i, ids in enumerate(rows) if len(ids) > self._specials]
        for group in _passes(filled, [len(ids) for ids in rows]):
            out[group] = self._vectors([rows[i] for i in group]).numpy()
            self.tokens += sum(len(rows[i]) for i in group)
        return self._unit(out)

    def token_ids(self, text: str) -> list[int]:
        """Token ids that go through the model, including special tokens."""
        head = text[: self.head_chars]
        clean = head if head.isascii() else head.encode("utf-8", "replace").decode()
        ids: list[int] = self._tokenizer.encode(clean).ids
        return ids

    def cuts(self, text: str) -> bool:
        """Whether `encode` reads only the beginning of a text."""
        return len(text) > self.head_chars or bool(self._tokenizer.encode(text).overflowing)

    def _vectors(self, rows: Rows) -> Tensor:
        with torch.inference_mode(), _torch_threads(self._threads):
            return torch.stack([self._pooled(states) for states in self._states(rows)])

    def _pooled(self, states: Tensor) -> Tensor:
        """[layers, tokens, dim] → [LAYERS, dim], with zeros for missing layers. When the pooling
        changes the dimension, all rows are the sentence embedding."""
        sentence = self._pool(states[-1])
        if len(sentence) != states.shape[-1]:
            return sentence.expand(LAYERS, -1)
        before = states[:-1].mean(dim=1)
        missing = before.new_zeros(LAYERS - 1 - len(before), len(sentence))
        return torch.cat([missing, before, sentence[None]])

    def _unit(self, vectors: Matrix) -> Matrix:
        finite = np.isfinite(vectors).all((1, 2))
        self.broken += int((~finite).sum())
        vectors[~finite] = 0
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=2, keepdims=True)
        unit: Matrix = (vectors / np.maximum(lengths, 1e-30)).astype(np.float32)
        return unit

    def _choose(self, model: PreTrainedModel) -> tuple[States, str]:
        """Selects INT8 when it is available and agrees with the model on a probe."""
        fp32 = _Padded(model)
        if type(model) is BertModel:
            with suppress(ValueError, RuntimeError, AttributeError):  # a decoder, or no INT8 here
                int8, probe = Int8Bert(model, LAYERS), [self.token_ids(_PROBE)]
                with torch.inference_mode():
                    similarity = torch.cosine_similarity(int8(probe)[0], fp32(probe)[0], -1)
                if similarity.min() >= AGREEMENT:
                    return int8, "int8"
        return fp32, "fp32"


class _Padded:
    """The model's forward in fp32; rows are padded to the longest."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._pad = model.config.pad_token_id or 0

    def __call__(self, rows: Rows) -> list[Tensor]:
        ids, mask = padded(rows, self._pad)
        output = self._model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        states = torch.stack([*output.hidden_states[-LAYERS:-1], output.last_hidden_state])
        return [states[:, i, : len(row)] for i, row in enumerate(rows)]


def padded(rows: Rows, pad: int) -> tuple[Tensor, Tensor]:
    """Returns token ids and mask, [rows, longest]."""
    longest = max(map(len, rows))
    ids = [[*row, *[pad] * (longest - len(row))] for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def _passes(wanted: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Yields groups of rows of similar length with at most PASS_TOKENS padded tokens."""
    group: list[int] = []
    for i in sorted(wanted, key=lengths.__getitem__):
        if group and (len(group) + 1) * lengths[i] > PASS_TOKENS:
            yield group
            group = []
        group.append(i)
    if group:
        yield group


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Sets PyTorch's thread count for the block and restores it.

    The count is thread-local, except in threads that use PyTorch for the first time meanwhile.
    """
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if file.is_file():
        return Tokenizer.from_file(str(file))
    loaded: Tokenizer = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    return loaded


def _load_model(folder: Path) -> PreTrainedModel:
    with without_progress_bar():
        model, seen = AutoModel.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
    missing = [key for key in seen["missing_keys"] if not key.startswith("pooler.")]
    if missing:
        raise ValueError(
            f"{len(missing)} weights are missing from its files, for example {sorted(missing)[0]}"
        )
    return model.eval()
