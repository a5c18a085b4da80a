"""A causal LM loaded by transformers, with attention over paged blocks.

The model runs on a packed row [1, Σ tokens]; paged_attention.py replaces its attention. Common
layouts have a fused forward, used if its logits agree at start.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from services.runtime.refusals.config import KEEPS_STATE, OTHER_FAMILY
from services.worker.kernels.interface import AttentionStep
from services.worker.kernels.low_rank import LowRankMap, StepAdapters
from services.worker.kernels.selection import layer_ops_for, low_rank_for
from services.worker.model.adapters.hooks import AdapterHooks, find_linears
from services.worker.model.adapters.pool import AdapterPool, map_parts
from services.worker.model.compiled import INDUCTOR, Backend, CompiledForward
from services.worker.model.dtypes import choose_dtype
from services.worker.model.fused import FusedForward
from services.worker.model.fused_layouts import find_layout
from services.worker.model.paged_attention import ATTENTION, paged_attention
from services.worker.model.probe import (
    PROBE_TOKENS,
    Probe,
    UnsupportedAttention,
    probe_sequences,
    probe_tokens,
    relative_shift,
)
from services.worker.model.rank_group import RankGroup
from services.worker.model.support import (
    MAX_ERROR_CHARS,
    explained_load_errors,
    own_attention,
    require_loaded,
    require_supported,
)
from services.worker.model.tensor_sharding import TensorSharder
from services.worker.model.weights import logged_loading, require_adapter_memory, require_memory

UNBOUNDED_TOKENS = 2**31 - 1  # positions of a model without a limit
PROBED = 6  # tokens of each of the two sequences that every model runs at start
INT8_PROBE_TOKENS = 32
MAX_INT8_SHIFT = 0.1  # relative to the size of the logits; about 0.01 for models that tolerate INT8
# The same for INT8 weights, of the row that differs most: 0.05 to 0.2 for random models with sharp
# attention.
MAX_INT8_WEIGHTS_SHIFT = 0.3
# Limits of the relative difference of logits between two forwards. Deep models in float32 stay
# below 1e-4. In half precision two correct roundings may differ by a tenth where attention is
# sharp; a wrong forward differs more.
MAX_SHIFT, MAX_SHIFT_HALF = 1e-3, 0.15
TRANSFORMERS_FORWARD = "transformers' forward"

WholeForward = Callable[[Tensor, Tensor, AttentionStep], Tensor]  # logits of all tokens

log = logging.getLogger(__name__)


class PagedModel:
    """A loaded model. `shapes` are the KV shapes of its layers, `heads` their numbers of query
    heads; `eos_ids` end a sequence; `forward_name` describes the forward in use. With `fuse`, the
    fused forward is used if it agrees with transformers'. `ranks` is set if the module is one
    rank's part."""

    def __init__(
        self,
        module: PreTrainedModel,
        device: torch.device,
        fuse: bool = True,
        ranks: RankGroup | None = None,
    ):
        # Registered without a mask function: transformers' masks would read positions in each step
        # and wait for the device. The kernels apply causality and windows.
        AttentionInterface.register(ATTENTION, paged_attention)
        module.train(False)
        self.module = module.requires_grad_(False).to(device)
        self.device = device
        self.dtype: torch.dtype = module.dtype
        self.dtype_reason = "configured"  # why this dtype was chosen
        config = module.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        self.max_context_tokens: int = limit or UNBOUNDED_TOKENS
        self.vocab_size: int = config.vocab_size
        self.parameters: int = module.num_parameters()
        self.eos_ids = _eos_ids(module)
        self._fused: FusedForward | CompiledForward | None = None
        self.adapters = AdapterPool({}, 0, 0, 0)
        self._hooks = AdapterHooks()
        self.forward_name = TRANSFORMERS_FORWARD
        self._recorded = probe = self._probe(config.num_hidden_layers)
        self.shapes = [probe.shapes[layer] for layer in sorted(probe.shapes)]
        self.heads = [probe.heads[layer] for layer in sorted(probe.heads)]
        if fuse:
            self._fused, self.forward_name = self._fuse(ranks)

    @property
    def placement(self) -> str:
        """Dtype and device, and why that dtype, for the log and the ready line."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} on {self.device} ({self.dtype_reason})"

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        step: AttentionStep,
        rows: Tensor | None,
        adapters: StepAdapters | None = None,
    ) -> Tensor:
        """Logits [rows, vocabulary] of the packed batch; of all its tokens if `rows` is None. A
        batch with `adapters` does not run through a compiled forward."""
        if self._fused is not None:
            if adapters is None:
                return self._fused(tokens, positions, step, rows)
            return self._fused.eager(tokens, positions, step, rows, adapters)
        self._hooks.rows = adapters.tokens if adapters else None
        output = self.module(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            foretoken=step,
        )
        return cast(Tensor, output.logits[0])

    def hold_adapters(
        self, most: int, slots: int, rank: int, sharder: TensorSharder | None = None
    ) -> None:
        """Makes room for `most` adapters of ranks up to `rank` in host memory, and allocates
        `slots` on the device. `sharder` has kept this rank's part of the module. Called before
        weights are packed or the forward is compiled. Raises ValueError with a sentence if they do
        not fit."""
        require_adapter_memory(self.module, self.device, most, slots, rank, self.dtype)

        def make(inputs: int, widths: Sequence[int]) -> LowRankMap:
            return LowRankMap(slots, rank, inputs, widths, self.dtype, self.device)

        products = low_rank_for(self.device, self.dtype)
        if isinstance(self._fused, FusedForward):
            found = self._fused.hold_adapters(make, products)
        else:
            tokens = min(PROBED, self.max_context_tokens)
            linears = find_linears(self.module, lambda: self.forward_alone(tokens), tokens)
            found = {
                path: (self._hooks.attach(linear, make, products), 0)
                for path, linear in linears.items()
            }
        self.adapters = AdapterPool(map_parts(found, sharder), most, slots, rank)

    def forward_alone(self, tokens: int) -> None:
        """Runs one sequence without a cache, to measure the memory of a forward."""
        row = torch.zeros(tokens, dtype=torch.long, device=self.device)
        positions = torch.arange(tokens, device=self.device)
        self.forward(row, positions, Probe(), None)

    def require_int8(self) -> None:
        """Raises ValueError if the model's attention does not tolerate INT8 keys and values.

        A scale covers all channels of a head. A model with a few much larger channels, such as from
        large key biases, loses the precision of the others, with any tokens.
        """
        tokens = torch.arange(INT8_PROBE_TOKENS, device=self.device)
        spread = tokens * max(1, self.vocab_size // INT8_PROBE_TOKENS) % self.vocab_size
        native = self.forward(spread, tokens, Probe(), None).float()
        change = self.forward(spread, tokens, Probe(int8=True), None).float() - native
        shift = float(change.norm() / (native - native.mean(-1, keepdim=True)).norm())
        if not shift <= MAX_INT8_SHIFT:
            raise ValueError(
                f"kv_dtype int8 changes this model's logits by {shift:.0%} of their size: set "
                "kv_dtype to auto"
            )

    def _probe(self, layers: int) -> Probe:
        """Runs two short sequences in one packed row, to find each layer's KV shape, and to compare
        the result with that of transformers' attention for each of them alone: a state that other
        layers carry from token to token would leak into the second.

        Raises ValueError for a model with attention that cannot be replaced.
        """
        name = type(self.module).__name__
        tokens = torch.arange(2 * PROBED, device=self.device) % self.vocab_size
        positions = torch.arange(PROBED, device=self.device).repeat(2)
        expected = self._eager_logits(tokens.view(2, PROBED), None).flatten(0, 1)
        probe = Probe(sequences=2)
        try:
            ours = self.forward(tokens, positions, probe, None)
        except UnsupportedAttention as error:
            raise ValueError(f"its {name} {error}") from None
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"it is a {name}, and its attention cannot be replaced ({error}): {OTHER_FAMILY}"
            ) from None
        attending = len(probe.shapes)
        if not attending:
            raise ValueError(f"it {own_attention(name)}")
        if sorted(probe.shapes) != list(range(layers)):
            raise ValueError(
                f"only {attending} of its {layers} layers attend, and others may {KEEPS_STATE}: "
                + OTHER_FAMILY
            )
        tolerance = 1e-3 if self.dtype is torch.float32 else 5e-2
        if not torch.allclose(ours, expected, rtol=0, atol=tolerance * float(expected.abs().max())):
            raise ValueError(
                f"it is a {name}, which computes two sequences in one batch with paged attention "
                f"otherwise than each alone with transformers' attention: {OTHER_FAMILY}"
            )
        return probe

    @torch.inference_mode()
    def _eager_logits(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        """Logits [sequences, tokens, vocabulary] by transformers' forward and attention."""
        self.module.set_attn_implementation("eager")
        try:
            logits: Tensor = self.module(
                input_ids=ids, position_ids=positions, use_cache=False
            ).logits
        finally:
            self.module.set_attn_implementation(ATTENTION)
        return logits

    def compile_forward(self, backend: Backend = INDUCTOR) -> None:
        """Compiles the fused forward, which takes seconds and a compiler. If that fails, or the
        results differ, the eager forward is used with a warning. The number of threads must be
        final, because a graph is compiled for it."""
        if not isinstance(self._fused, FusedForward):
            log.warning("nothing is compiled, because %s is used", self.forward_name)
            return
        compiled = CompiledForward(self._fused, backend)
        try:
            why = self._mismatch(compiled.prepare) or self._mismatch_of_one(compiled.prepare)
        except Exception as error:  # any error of the compiler
            why = f"it fails: {' '.join(str(error).split())[:MAX_ERROR_CHARS]}"
        if why:
            log.warning("the compiled forward is not used: %s", why)
            return
        self._fused, self.forward_name = compiled, f"{self.forward_name}, compiled"

    def pack_weights(self) -> None:
        """Changes the fused forward's weights to the layout that the device's products are fastest
        with, if it has one. Afterwards the module has no weights: transformers' forward, and a
        compiled one, cannot run. The number of threads must be final.

        Raises ValueError if the results differ.
        """
        fused = self._fused
        if isinstance(fused, FusedForward) and fused.packs:
            why = self._difference(*self._logits_around(fused.pack_weights))
            if why:
                raise ValueError(f"with packed weights {why}: set fused_forward to off")
            self.forward_name = f"{self.forward_name}, packed weights"

    def quantize_weights(self) -> None:
        """Stores the weights of the fused forward's layers in INT8, and packs the others.

        Raises ValueError, with a sentence that says what to change, without a fused forward, where
        the device has no INT8 products, or if the model does not tolerate INT8.
        """
        fused = self._fused
        if not isinstance(fused, FusedForward):
            raise ValueError(
                f"quantization int8 needs the fused forward, and {self.forward_name} is used: set "
                "quantization to none"
            )
        if missing := fused.lacks_for_int8():
            raise ValueError(f"quantization int8 needs {missing}: set quantization to none")
        shift = relative_shift(*self._logits_around(fused.quantize_weights))
        if not shift <= MAX_INT8_WEIGHTS_SHIFT:
            raise ValueError(
                f"quantization int8 changes this model's logits by {shift:.0%} of their size: set "
                "quantization to none"
            )
        self.forward_name = f"{self.forward_name}, INT8 weights"

    def _logits_around(self, change: Callable[[], None]) -> tuple[Tensor, Tensor]:
        """Logits of a few tokens after a change of the forward, and before it."""
        tokens = min(PROBE_TOKENS, self.max_context_tokens)
        ids, positions = (
            x.to(self.device)
            for x in probe_sequences(tokens, self.vocab_size, self.max_context_tokens)
        )

        def probe() -> Tensor:
            return self.forward(ids.flatten(), positions.flatten(), Probe(len(ids)), None)

        before = probe()
        change()
        return probe(), before

    def _fuse(self, ranks: RankGroup | None) -> tuple[FusedForward | None, str]:
        """The fused forward, if the model's layout has one and it agrees, else None; and a
        description of the forward in use."""
        try:
            layout = find_layout(self.module, sharded=ranks is not None)
            if isinstance(layout, str):
                return None, f"{TRANSFORMERS_FORWARD} ({layout})"
            ops = layer_ops_for(self.device, self.dtype)
            fused = FusedForward(self.module, layout, self.max_context_tokens, ops, ranks)
            why = self._mismatch(lambda tokens, at, step: fused(tokens, at, step, None))
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            why = f"it fails: {' '.join(str(error).split())[:MAX_ERROR_CHARS]}"
        if why:
            log.warning("the fused forward is not used: %s", why)
            return None, f"{TRANSFORMERS_FORWARD} (the fused one is not used)"
        return fused, "fused forward"

    @torch.inference_mode()
    def _mismatch(self, forward: WholeForward) -> str:
        """How a forward differs from transformers'; empty if it agrees.

        Compares the logits of two sequences, from both ends of the context, and each layer's
        attention options, which show a wrong window that the sequences are too short for.
        """
        known = self._recorded
        windows = [options.window for options in known.options.values()]
        numbers = sum(known.heads[i] * shape.head_dim for i, shape in known.shapes.items())
        limit = self.max_context_tokens
        tokens = probe_tokens(self.parameters, numbers, windows, limit)
        ids, positions = (
            x.to(self.device) for x in probe_sequences(tokens, self.vocab_size, limit)
        )
        recorded = Probe(sequences=len(ids))
        ours = forward(ids.flatten(), positions.flatten(), recorded)
        if recorded.options != known.options:
            return "its layers attend with other options"
        return self._difference(ours, self._eager_logits(ids, positions).flatten(0, 1))

    @torch.inference_mode()
    def _mismatch_of_one(self, forward: WholeForward) -> str:
        """As `_mismatch`, for one token, which has a separate graph."""
        token = torch.ones(1, dtype=torch.long, device=self.device)
        ours = forward(token, token - 1, Probe())
        return self._difference(ours, self._eager_logits(token[None], None)[0])

    def _difference(self, ours: Tensor, expected: Tensor) -> str:
        shift = relative_shift(ours, expected)
        if not shift <= (MAX_SHIFT if self.dtype is torch.float32 else MAX_SHIFT_HALF):
            return f"its logits differ by {shift:.2%} of their size"
        return ""


def _eos_ids(module: PreTrainedModel) -> frozenset[int]:
    generation: Any = module.generation_config
    ids = generation.eos_token_id if generation else None
    ids = module.config.get_text_config().eos_token_id if ids is None else ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def load_model(
    name: str,
    device: torch.device,
    dtype: str = "auto",
    fuse: bool = True,
    before_run: Callable[[PreTrainedModel], None] = lambda _: None,
    sharder: TensorSharder | None = None,
) -> PagedModel:
    """Loads a folder or a hub model. `dtype`: see dtypes.py. `before_run` is called before anything
    runs; `sharder` keeps one rank's part.

    Raises ValueError with a sentence if there is no such model or it cannot run here.
    """
    with explained_load_errors(name):
        require_supported(name)
        choice = choose_dtype(name, device, dtype)
        ranks = sharder.ranks if sharder else None
        # Ranks on a CPU share host memory, which `settled` has checked.
        if ranks is None or device.type == "cuda":
            require_memory(name, device, choice.dtype, parts=ranks.size if ranks else 1)
        with logged_loading():
            module, loaded = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=choice.dtype,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # reported below
                output_loading_info=True,
            )
        require_loaded(loaded)
        if sharder is not None:
            sharder.shard(module)
        before_run(module)
        model = PagedModel(module, device, fuse, ranks)
        model.dtype_reason = choice.reason
        return model
