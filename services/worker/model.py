"""Any causal LM that transformers loads, its modules unchanged, attending into paged blocks.

The model runs on a packed row [1, Σ tokens]; every layer's attention is handed to the
`PagedStep` that travels through `forward` as a keyword argument.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from services.worker.cache import KVCache, KVShape
from services.worker.kernels.interface import AttentionKernels, AttentionOptions
from services.worker.kernels.torch_paging import quantize

ATTENTION = "foretoken_paged"
SENTENCE_MAX = 300  # characters of what another library says went wrong
UNBOUNDED_TOKENS = 2**31 - 1  # positions of a model that names no limit
INT8_PROBE_TOKENS = 32
INT8_SHIFT_MAX = 0.1  # of the logits' own size; models that take INT8 well stay near 0.01


class AttentionStep(Protocol):
    """One forward's attention, called once a layer."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """q, k, v [Σ tokens, heads, head_dim] → the shape of q."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attention into the cache, for the batch that `kernels` were prepared for."""

    cache: KVCache
    kernels: AttentionKernels

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        blocks = self.cache.layers[layer]
        self.kernels.store(blocks, k, v)
        return self.kernels.attend(blocks, q, k, v, options)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    foretoken: AttentionStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, heads, Σ tokens, head_dim] → [1, Σ, heads, dim].

    `unused` holds what only other backends or training read (dropout, position_ids …).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = _options(scale, sliding_window, softcap)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    return foretoken.attend(cast(int, module.layer_idx), q, k, v, options)[None], None


@lru_cache(maxsize=64)  # called once a layer and step, with as many values as kinds of layer
def _options(scale: float, window: int | None, softcap: float | None) -> AttentionOptions:
    return AttentionOptions(scale, window, softcap)


def no_mask(*_: object, **__: object) -> None:
    """Causality and sequence bounds are the kernels' business."""


class PagedModel:
    """A loaded model. `shapes` are its layers' KV, `heads` their query heads; `eos_ids` end a
    sequence."""

    def __init__(self, module: PreTrainedModel, device: torch.device):
        AttentionInterface.register(ATTENTION, paged_attention)
        AttentionMaskInterface.register(ATTENTION, no_mask)
        module.train(False)
        self.module = module.requires_grad_(False).to(device)
        self.device = device
        self.dtype: torch.dtype = module.dtype
        config = module.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        self.max_context_tokens: int = limit or UNBOUNDED_TOKENS
        self.vocab_size: int = config.vocab_size
        self.eos_ids = _eos_ids(module)
        probe = self._probe(config.num_hidden_layers)
        self.shapes = [probe.shapes[layer] for layer in sorted(probe.shapes)]
        self.heads = [probe.heads[layer] for layer in sorted(probe.heads)]

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, step: AttentionStep, rows: Tensor | None
    ) -> Tensor:
        """Logits [rows, vocabulary] of the packed batch; of all its tokens if `rows` is None."""
        output = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            foretoken=step,
        )
        return cast(Tensor, output.logits[0])

    def forward_alone(self, tokens: int) -> None:
        """A forward of one sequence without a cache, for what memory it takes."""
        row = torch.zeros(tokens, dtype=torch.long, device=self.device)
        positions = torch.arange(tokens, device=self.device)
        self.forward(row, positions, _Probe(), None)

    def require_int8(self) -> None:
        """Raises ValueError where the model's attention does not survive INT8 keys and values.

        Scales cover a head's channels together, so a model with a few channels far larger than
        the rest (as large biases of keys make them) loses the rest. That shows on any tokens.
        """
        tokens = torch.arange(INT8_PROBE_TOKENS, device=self.device)
        spread = tokens * max(1, self.vocab_size // INT8_PROBE_TOKENS) % self.vocab_size
        own = self.forward(spread, tokens, _Probe(), None).float()
        moved = self.forward(spread, tokens, _Probe(int8=True), None).float() - own
        shift = float(moved.norm() / (own - own.mean(-1, keepdim=True)).norm())
        if not shift <= INT8_SHIFT_MAX:
            raise ValueError(
                f"kv_dtype int8 moves this model's logits by {shift:.0%} of their size, so its "
                "answers would suffer: set kv_dtype to auto"
            )

    def _probe(self, layers: int) -> "_Probe":
        """Run a few tokens to see each layer's KV, and that the result is the model's own.

        Raises ValueError for a model whose attention cannot be replaced.
        """
        tokens = torch.arange(6, device=self.device) % self.vocab_size
        positions = torch.arange(6, device=self.device)
        with torch.inference_mode():
            self.module.set_attn_implementation("eager")
            own = self.module(input_ids=tokens[None], use_cache=False).logits[0]
        self.module.set_attn_implementation(ATTENTION)
        probe = _Probe()
        try:
            ours = self.forward(tokens, positions, probe, None)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"its attention cannot be replaced ({error})") from None
        if sorted(probe.shapes) != list(range(layers)):
            raise ValueError(f"only {len(probe.shapes)} of its {layers} layers attend")
        tolerance = 1e-3 if self.dtype is torch.float32 else 5e-2
        if not torch.allclose(ours, own, rtol=0, atol=tolerance * float(own.abs().max())):
            raise ValueError("its own attention gives other results than ours")
        return probe


@dataclass(frozen=True)
class _Probe:
    """Plain causal attention over one sequence, which notes what each layer stores.

    With `int8`, over keys and values as an INT8 cache gives them back.
    """

    int8: bool = False
    shapes: dict[int, KVShape] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        if k.shape != v.shape:
            raise ValueError("its keys and values differ in shape")
        self.shapes[layer] = KVShape(k.shape[1], k.shape[2])
        self.heads[layer] = q.shape[1]
        if self.int8:
            k, v = _through_int8(k), _through_int8(v)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * options.scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        seen = torch.ones_like(scores, dtype=torch.bool).tril()
        if options.window is not None:
            seen = seen.triu(1 - options.window)
        scores = scores.masked_fill(~seen, -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def _through_int8(x: Tensor) -> Tensor:
    codes, scales = quantize(x)
    return (codes * scales.unsqueeze(-1)).to(x.dtype)


def _eos_ids(module: PreTrainedModel) -> frozenset[int]:
    generation: Any = module.generation_config
    ids = generation.eos_token_id if generation else None
    ids = module.config.get_text_config().eos_token_id if ids is None else ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def load_model(name: str, device: torch.device, dtype: str = "auto") -> PagedModel:
    """Load a folder or a Hub id. `dtype` auto: float32 on a CPU, the checkpoint's own elsewhere.

    Raises ValueError, one sentence, when there is no such model or it cannot run here.
    """
    if dtype == "auto" and device.type == "cpu":
        dtype = "float32"
    try:
        _require_folder(name)
        module, loaded = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        if missing := sorted(loaded["missing_keys"]):
            raise ValueError(f"{len(missing)} weights are not in its files, as {missing[0]}")
        return PagedModel(module, device)
    except Exception as error:  # whatever transformers, safetensors or json say of a bad folder
        why = " ".join(str(error).split())[:SENTENCE_MAX] or type(error).__name__
        raise ValueError(f"cannot load model {name!r}: {why}") from error


def _require_folder(name: str) -> None:
    """Refuse what can only be meant as a folder and is none, or is one without a model."""
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").exists():
        raise ValueError("the folder has no config.json")
    if not folder.is_dir() and (name.count("/") > 1 or name.startswith(("/", ".", "~"))):
        raise ValueError("there is no such folder")
