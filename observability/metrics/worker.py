"""Metrics of a worker: steps, memory and KV moves. Every series has `model_name` and `worker`."""

from observability.metrics.metric import LATENCY_S, STEP_S, TOKENS, counter, gauge, histogram

RUNNING = gauge("worker_requests_running", "Requests admitted to the worker and not finished.")
RESTING = gauge(
    "worker_requests_resting",
    "Requests with KV in host memory.",
    vllm="num_requests_swapped",
)
STEP = histogram("worker_step_seconds", "Time of an engine step.", buckets=STEP_S)
BATCH_TOKENS = histogram("worker_batch_tokens", "Tokens per step.", buckets=TOKENS)
BUSY = counter("worker_busy_seconds", "Time of the engine's thread in steps; otherwise it is idle.")
PHASES = counter(
    "worker_phase_seconds",
    "Busy time by phase: compose, swap (waiting for KV from host memory), model, attention, "
    "sampling, commit. On a GPU the model phase includes attention and sampling.",
    "phase",
)  # fmt: skip
DECODED = counter("worker_generated_tokens", "Generated tokens.")
PREFILLED = counter("worker_prefilled_tokens", "Prefilled tokens, including recomputed ones.")
PADDING = counter("worker_padding_tokens", "Tokens prefilled as padding of static batches.")
PADDING_LEFT_OUT = counter(
    "worker_padding_left_out_tokens",
    "Padding of static batches omitted for lack of memory or after a failed step.",
)
INVALID = counter(
    "worker_invalid_tokens",
    "Tokens generated after a request's end, while its static batch continued.",
)
STRAY = counter(
    "worker_stray_rows",
    "Rows computed a step ahead for requests that had already ended.",
)
USAGE = gauge("kv_cache_usage_perc", "Share of the device's KV blocks held by requests, 0 to 1.")
HOST_USAGE = gauge(
    "host_kv_cache_usage_perc",
    "Share of the host's KV blocks in use, 0 to 1.",
    vllm="cpu_cache_usage_perc",
)
BLOCKS = gauge(
    "kv_blocks",
    "KV blocks by state: on the device held by requests (held), kept for prefix sharing (cached) "
    "or free; in host memory used (resting) or free (host_free).",
    "state",
)  # fmt: skip
BLOCK_TOKENS = gauge("kv_block_tokens", "Tokens per KV block.")
EVICTIONS = counter(
    "worker_evictions",
    "Requests evicted for lack of memory, by what happened to their KV: offloaded or dropped.",
    "kv",
)  # fmt: skip
OFFLOADS = counter("kv_offloads", "Requests whose KV moved to host memory.")
OFFLOADED_TOKENS = counter("kv_offloaded_tokens", "KV tokens moved to host memory.")
UPLOADS = counter("kv_uploads", "Requests whose KV returned from host memory.")
UPLOADED_TOKENS = counter("kv_uploaded_tokens", "KV tokens returned from host memory.")
DROPPED = counter("kv_dropped", "Requests whose KV was dropped, to be recomputed.")
HOST_FULL = counter("kv_host_full", "Requests whose KV was dropped because host memory was full.")
SWAP_BYTES = counter("kv_swap_bytes", "KV bytes copied between device and host.", "direction")
SWAP = histogram(
    "kv_swap_seconds", "Time to copy one request's KV between device and host.", "direction",
    buckets=LATENCY_S,
)  # fmt: skip
PREFIX_QUERIES = counter("prefix_cache_queries", "Prefill tokens looked up in the prefix cache.")
PREFIX_HITS = counter("prefix_cache_hits", "Prefill tokens found in the prefix cache.")

ALL = (
    RUNNING, RESTING, STEP, BATCH_TOKENS, BUSY, PHASES, DECODED, PREFILLED, PADDING,
    PADDING_LEFT_OUT, INVALID, STRAY, USAGE, HOST_USAGE, BLOCKS, BLOCK_TOKENS, EVICTIONS, OFFLOADS,
    OFFLOADED_TOKENS, UPLOADS, UPLOADED_TOKENS, DROPPED, HOST_FULL, SWAP_BYTES, SWAP,
    PREFIX_QUERIES, PREFIX_HITS,
)  # fmt: skip
