"""Step times and KV capacity derived from a GPU's peak figures and a model's shape.

The roofline model (Williams et al., "Roofline: an insightful visual performance model for
multicore architectures", CACM 52(4), 2009) bounds the time of a kernel by bytes over bandwidth and
by operations over peak. Pope et al. ("Efficiently scaling transformer inference", MLSys 2023,
§2-3) apply it to decoders: a step reads all weights and all KV of its sequences, and multiplies
every token by all weights. The cost model is linear, so the two bounds are added instead of taking
the larger one: steps near the ridge point come out too slow, by at most the smaller bound.
"""

from typing import Annotated, Literal

from pydantic import Field

from services.costs import CostModel
from simulator.hardware.devices import BYTES, GIB, Dtype, Gpu, Model, find_gpu, find_model
from simulator.hardware.records import Record

Share = Annotated[float, Field(gt=0, le=1)]
SOURCE = "roofline"
ALL_REDUCES = 2  # per layer with tensor parallelism: after attention and after the MLP


class Roofline(Record):
    """A model on GPUs, and the shares of their peaks that an engine reaches.

    The defaults are those that the fit of the profile `rtxpro6000-llama3.1-8b` shows for vLLM 0.28:
    0.90 of the bandwidth for KV, 0.77 of the float16 peak for prompts, half of a decoded token's
    operations hidden by the reads of weights, and 2.7 ms a step for launches and scheduling.
    """

    gpu: str | Gpu
    model: str | Model
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    dtype: Dtype = "float16"
    kv_dtype: Dtype | Literal["auto"] = "auto"  # auto: as the weights; float16 for INT weights
    host_kv_dtype: Dtype | Literal["auto"] = "auto"  # auto: as on the device
    bandwidth_efficiency: Share = 0.9
    flops_efficiency: Share = 0.77
    host_efficiency: Share = 0.8
    link_efficiency: Share = 0.7
    decode_flops_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    step_overhead_s: Annotated[float, Field(ge=0)] = 0.0027

    @property
    def on_gpu(self) -> Gpu:
        """Raises ValueError for an unknown name."""
        return find_gpu(self.gpu) if isinstance(self.gpu, str) else self.gpu

    @property
    def of_model(self) -> Model:
        """Raises ValueError for an unknown name."""
        return find_model(self.model) if isinstance(self.model, str) else self.model

    @property
    def kv_token_bytes(self) -> float:
        """Bytes of one token's KV over all GPUs."""
        return self.of_model.kv_bytes(self._kv_dtype)

    @property
    def host_kv_token_bytes(self) -> float:
        """Bytes of one token's KV in host memory."""
        dtype = self._kv_dtype if self.host_kv_dtype == "auto" else self.host_kv_dtype
        return self.of_model.kv_bytes(dtype)

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights over all GPUs."""
        return self.of_model.parameters * BYTES[self.dtype]

    @property
    def _kv_dtype(self) -> Dtype:
        if self.kv_dtype != "auto":
            return self.kv_dtype
        return "float16" if self.dtype in ("int8", "int4") else self.dtype


def derive_cost(roofline: Roofline) -> CostModel:
    """The cost model of a packed step; see the functions below for each coefficient."""
    token_s = _compute_token_s(roofline)
    reduce_token_s = _all_reduce_token_s(roofline)
    return CostModel(
        base_s=_weights_s(roofline) + _all_reduce_base_s(roofline) + roofline.step_overhead_s,
        prefill_token_s=token_s + reduce_token_s,
        decode_seq_s=token_s * roofline.decode_flops_share + reduce_token_s,
        context_token_s=_kv_read_token_s(roofline),
        source=SOURCE,
        offload_token_s=_swap_token_s(roofline),
        upload_token_s=_swap_token_s(roofline),
        quantize_token_s=_quantize_token_s(roofline),
    )


def derive_bounds(roofline: Roofline) -> CostModel:
    """The least times that the hardware allows: every weight and every KV token is read once a step
    at peak bandwidth. Prompts and sequences are bounded by 0, because their operations may be
    hidden by those reads."""
    gpu, model = roofline.on_gpu, roofline.of_model
    bandwidth = gpu.bandwidth * roofline.tensor_parallel
    weights_s = model.multiplied_parameters * BYTES[roofline.dtype] / bandwidth
    return CostModel(weights_s, 0.0, 0.0, roofline.kv_token_bytes / bandwidth, source=SOURCE)


def derive_kv_tokens(
    roofline: Roofline,
    utilization: float,
    workspace_gib: float,
    remedy: str = "raise roofline.tensor_parallel or memory.utilization",
) -> int:
    """KV tokens that fit: the engine's share of each GPU, without weights and workspace (Kwon et
    al., "Efficient memory management for large language model serving with PagedAttention", SOSP
    2023, §5). Raises ValueError, with the remedy, if the weights do not fit."""
    gpu, size = roofline.on_gpu, roofline.tensor_parallel
    room = gpu.memory_gib * GIB * utilization - roofline.weight_bytes / size - workspace_gib * GIB
    tokens = int(room * size / _replicated_kv_bytes(roofline))
    if tokens < 1:
        raise ValueError(
            f"{roofline.weight_bytes / GIB:.1f} GiB of weights on {size} "
            f"GPU{'s' if size > 1 else ''} of {gpu.memory_gib:g} GiB leave no room for KV; {remedy}"
        )
    return tokens


def derive_host_tokens(roofline: Roofline, host_gib: float) -> int:
    """KV tokens that fit in host memory."""
    return int(host_gib * GIB / roofline.host_kv_token_bytes)


def _weights_s(roofline: Roofline) -> float:
    """Each GPU reads its part of the weights once a step (Pope et al., 2023, §3.1)."""
    gpu = roofline.on_gpu
    read = roofline.of_model.multiplied_parameters * BYTES[roofline.dtype]
    return read / roofline.tensor_parallel / (gpu.bandwidth * roofline.bandwidth_efficiency)


def _compute_token_s(roofline: Roofline) -> float:
    """Two operations per weight and token (Kaplan et al., "Scaling laws for neural language
    models", 2020, §2.1). Attention's own operations, 4·layers·hidden a token of context, are left
    out: below 10 % of these up to 4,000 tokens for 7 billion parameters."""
    operations = 2 * roofline.of_model.multiplied_parameters / roofline.tensor_parallel
    return operations / (roofline.on_gpu.flops(roofline.dtype) * roofline.flops_efficiency)


def _kv_read_token_s(roofline: Roofline) -> float:
    """Attention reads the KV of every token of context once a step."""
    gpu, size = roofline.on_gpu, roofline.tensor_parallel
    return _replicated_kv_bytes(roofline) / size / (gpu.bandwidth * roofline.bandwidth_efficiency)


def _replicated_kv_bytes(roofline: Roofline) -> float:
    """Bytes of one token's KV over all GPUs; KV heads fewer than GPUs are held more than once."""
    heads = roofline.of_model.kv_heads
    copies = max(1.0, roofline.tensor_parallel / heads)
    return roofline.kv_token_bytes * copies


def _all_reduce_token_s(roofline: Roofline) -> float:
    """Two all-reduces a layer (Shoeybi et al., "Megatron-LM", 2019, §3) of one hidden vector; a
    ring moves 2·(n - 1)/n of it over each link (Patarasuk, Yuan, "Bandwidth optimal all-reduce
    algorithms for clusters of workstations", JPDC 69(2), 2009). Activations have 2 bytes, or 4 in
    float32."""
    gpu, size, model = roofline.on_gpu, roofline.tensor_parallel, roofline.of_model
    activation = max(2.0, BYTES[roofline.dtype])
    moved = 2 * (size - 1) / size * model.hidden * activation
    return ALL_REDUCES * model.layers * moved / (gpu.link_bandwidth * roofline.link_efficiency)


def _all_reduce_base_s(roofline: Roofline) -> float:
    """The latency of two all-reduces a layer, whatever their size."""
    if roofline.tensor_parallel == 1:
        return 0.0
    return ALL_REDUCES * roofline.of_model.layers * roofline.on_gpu.link_latency_s


def _swap_token_s(roofline: Roofline) -> float:
    """Each GPU copies its part of the KV over its own link to the host, in one direction."""
    link = roofline.on_gpu.host_bandwidth * roofline.host_efficiency * roofline.tensor_parallel
    return roofline.host_kv_token_bytes / link


def _quantize_token_s(roofline: Roofline) -> float:
    """Reading KV and writing it smaller, and the reverse: both are bound by bandwidth. 0 if host
    memory holds the same dtype."""
    device, host = roofline.kv_token_bytes, roofline.host_kv_token_bytes
    if device == host:
        return 0.0
    gpu = roofline.on_gpu
    bandwidth = gpu.bandwidth * roofline.bandwidth_efficiency * roofline.tensor_parallel
    return 2 * (device + host) / bandwidth
