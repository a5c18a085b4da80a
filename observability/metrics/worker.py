"""Metrics of a worker: steps, memory and KV moves. Every series has `model_name` and `worker`."""

from observability.metrics.metric import (
    LATENCY_S,
    STEP_S,
    TOKENS,
    counter,
    gauge,
    histogram,
    invalid_messages,
    metrics_in,
)

RUNNING = gauge("worker_requests_running", "Requests admitted to the worker and not finished.")
RESTING = gauge(
    "worker_requests_resting",
    "Requests with KV in host memory.",
    vllm="num_requests_swapped",
)
STEP = histogram("worker_step_seconds", "Seconds of an engine step.", buckets=STEP_S)
BATCH_TOKENS = histogram("worker_batch_tokens", "Tokens computed by a step.", buckets=TOKENS)
BUSY = counter("worker_busy_seconds", "Seconds that the engine's thread spends in steps.")
PHASES = counter(
    "worker_phase_seconds",
    "Seconds of steps, by phase: compose, swap (waiting for KV from host memory), model, "
    "attention, sampling, commit. On a GPU the model phase includes attention and sampling.",
    "phase",
)  # fmt: skip
DECODED = counter("worker_generated_tokens", "Output tokens generated.")
PREFILLED = counter("worker_prefilled_tokens", "Prompt and recomputed tokens prefilled.")
PADDING = counter("worker_padding_tokens", "Padding tokens prefilled in static batches.")
PADDING_LEFT_OUT = counter(
    "worker_padding_left_out_tokens",
    "Padding tokens of static batches omitted for lack of memory or after a failed step.",
)
INVALID = counter(
    "worker_invalid_tokens",
    "Tokens generated after the end of a request because its static batch continued.",
)
STRAY = counter(
    "worker_stray_rows",
    "Batch rows computed a step ahead for requests that had already ended.",
)
DRAFTS = counter(
    "spec_decode_num_drafts", "Drafts of speculative decoding, one per request and step."
)
DRAFT_TOKENS = counter("spec_decode_num_draft_tokens", "Drafted tokens that steps verified.")
ACCEPTED_TOKENS = counter(
    "spec_decode_num_accepted_tokens",
    "Drafted tokens that were accepted: output tokens beyond one per request and step.",
)
USAGE = gauge("kv_cache_usage_perc", "Share (0 to 1) of the device's KV blocks held by requests.")
HOST_USAGE = gauge(
    "host_kv_cache_usage_perc",
    "Share (0 to 1) of the host's KV blocks in use.",
    vllm="cpu_cache_usage_perc",
)
BLOCKS = gauge(
    "kv_blocks",
    "KV blocks, by state: on the device held by requests (held), kept for prefix sharing (cached) "
    "or free; in host memory used (resting) or free (host_free).",
    "state",
)  # fmt: skip
BLOCK_TOKENS = gauge("kv_block_tokens", "Tokens per KV block.")
CACHE_CONFIG = gauge(
    "cache_config_info",
    "1; the labels are tokens per KV block and the device's KV blocks.",
    "block_size", "num_gpu_blocks",
)  # fmt: skip
EVICTIONS = counter(
    "worker_evictions",
    "Evictions of requests for lack of memory, by handling of the KV: offloaded or dropped.",
    "kv",
)  # fmt: skip
OFFLOADS = counter("kv_offloads", "Moves of a request's KV to host memory.")
OFFLOADED_TOKENS = counter("kv_offloaded_tokens", "Tokens of KV moved to host memory.")
UPLOADS = counter("kv_uploads", "Moves of a request's KV back from host memory.")
UPLOADED_TOKENS = counter("kv_uploaded_tokens", "Tokens of KV moved back from host memory.")
DROPPED = counter(
    "kv_dropped", "Preemptions that dropped the request's KV, which is recomputed later."
)
KV_EVENTS_DROPPED = counter(
    "worker_kv_events_dropped", "KV events that were not published because their queue was full."
)
HOST_FULL = counter(
    "kv_host_full", "Preemptions that dropped the request's KV because host memory was full."
)
SWAP_BYTES = counter(
    "kv_swap_bytes", "Bytes of KV copied between device and host, by direction.", "direction"
)
SWAP = histogram(
    "kv_swap_seconds",
    "Seconds to copy one request's KV between device and host, by direction.",
    "direction", buckets=LATENCY_S,
)  # fmt: skip
PREFIX_QUERIES = counter("prefix_cache_queries", "Prefill tokens looked up in the prefix cache.")
PREFIX_HITS = counter("prefix_cache_hits", "Prefill tokens found in the prefix cache.")
ADAPTERS = gauge(
    "worker_adapters",
    "LoRA adapters, by state: in host memory (held), of these in a slot of the device (placed), "
    "and those that requests need and that wait for a slot (waiting).",
    "state",
)  # fmt: skip
ADAPTER_BYTES = gauge(
    "worker_adapter_bytes",
    "Bytes for LoRA adapters: of those in host memory (host), and of all slots on the device "
    "(device).",
    "memory",
)  # fmt: skip
ADAPTER_COPIES = counter("worker_adapter_copies", "Copies of LoRA adapters to slots of the device.")
ADAPTER_COPY_S = counter(
    "worker_adapter_copy_seconds",
    "Seconds that the engine's thread spends on these copies; on a GPU it only launches them.",
)
ADAPTER_REQUESTS = counter(
    "worker_adapter_requests",
    "Requests with a LoRA adapter that reach the worker, moved ones included, by adapter: the "
    "first 32 by name, the rest as other.",
    "adapter",
)
INVALID_MESSAGES = invalid_messages("worker", "ended its stream")

ALL = metrics_in(globals())
