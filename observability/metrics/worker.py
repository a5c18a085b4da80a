"""What a worker counts: its steps, its memory, and what it moved. Every series has `model_name` and
`worker`."""

from observability.metrics.metric import LATENCY_S, STEP_S, TOKENS, counter, gauge, histogram

RUNNING = gauge("worker_requests_running", "Requests admitted here and not finished.")
RESTING = gauge(
    "worker_requests_resting",
    "Requests whose KV rests in host memory.",
    vllm="num_requests_swapped",
)
STEP = histogram("worker_step_seconds", "Time of an engine step.", buckets=STEP_S)
BATCH_TOKENS = histogram("worker_batch_tokens", "Tokens computed by a step.", buckets=TOKENS)
BUSY = counter(
    "worker_busy_seconds", "Time of the engine's thread in steps; the rest of it was idle."
)
PHASES = counter(
    "worker_phase_seconds",
    "Of that, by phase: compose, swap (nothing runs before KV is back from host memory), model, "
    "attention, sampling, commit. On a GPU attention and sampling are told with the model, whose "
    "time is that of waiting for all three.",
    "phase",
)  # fmt: skip
DECODED = counter("worker_generated_tokens", "Tokens drawn.")
PREFILLED = counter("worker_prefilled_tokens", "Tokens prefilled, recomputed ones too.")
PADDING = counter("worker_padding_tokens", "Tokens prefilled as padding of static batches.")
PADDING_LEFT_OUT = counter(
    "worker_padding_left_out_tokens",
    "Padding of static batches that memory had no room for, or that broke a step.",
)
INVALID = counter(
    "worker_invalid_tokens",
    "Tokens drawn after a request's end, while its static batch went on.",
)
STRAY = counter(
    "worker_stray_rows",
    "Rows computed a step ahead for requests that had ended or gone by then.",
)
USAGE = gauge("kv_cache_usage_perc", "Share of the device's KV blocks that somebody holds, 0 to 1.")
HOST_USAGE = gauge(
    "host_kv_cache_usage_perc", "The same of host memory.", vllm="cpu_cache_usage_perc"
)
BLOCKS = gauge(
    "kv_blocks",
    "KV blocks by state: on the device held by somebody (held), by nobody but found by their "
    "prefix (cached) or free, in host memory used (resting) or free (host_free).",
    "state",
)  # fmt: skip
BLOCK_TOKENS = gauge("kv_block_tokens", "Tokens that a KV block takes.")
EVICTIONS = counter(
    "worker_evictions",
    "Requests that left the device for want of memory, by what became of their KV: offloaded or "
    "dropped.",
    "kv",
)  # fmt: skip
OFFLOADS = counter("kv_offloads", "Requests whose KV went to host memory.")
OFFLOADED_TOKENS = counter("kv_offloaded_tokens", "Tokens of KV that went to host memory.")
UPLOADS = counter("kv_uploads", "Requests whose KV came back from host memory.")
UPLOADED_TOKENS = counter("kv_uploaded_tokens", "Tokens of KV that came back from host memory.")
DROPPED = counter("kv_dropped", "Requests whose KV was let go, to be computed again.")
HOST_FULL = counter("kv_host_full", "Of those, the ones that host memory had no room for.")
SWAP_BYTES = counter("kv_swap_bytes", "Bytes of KV copied between device and host.", "direction")
SWAP = histogram(
    "kv_swap_seconds", "Time to copy one request's KV between device and host.", "direction",
    buckets=LATENCY_S,
)  # fmt: skip
PREFIX_QUERIES = counter("prefix_cache_queries", "Tokens of prefills looked up.")
PREFIX_HITS = counter("prefix_cache_hits", "Of those, the ones whose KV was there already.")

ALL = (
    RUNNING, RESTING, STEP, BATCH_TOKENS, BUSY, PHASES, DECODED, PREFILLED, PADDING,
    PADDING_LEFT_OUT, INVALID, STRAY, USAGE, HOST_USAGE, BLOCKS, BLOCK_TOKENS, EVICTIONS, OFFLOADS,
    OFFLOADED_TOKENS, UPLOADS, UPLOADED_TOKENS, DROPPED, HOST_FULL, SWAP_BYTES, SWAP,
    PREFIX_QUERIES, PREFIX_HITS,
)  # fmt: skip
