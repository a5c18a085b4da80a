"""Metrics of the gateway: requests as their clients see them. Every series has `model_name`.

Each choice of a request counts as a request. Times end when the client's socket accepts the tokens;
the tokens of a response that is not streamed count when they reach the gateway. `class` is a
configured SLA class, or `custom` for requests with explicit budgets.
"""

from observability.metrics.metric import (
    GAP_S,
    counter,
    gauge,
    histogram,
    invalid_messages,
    metrics_in,
)

TTFT = histogram(
    "time_to_first_token_seconds", "Seconds from arrival to sending the first token.", "class"
)
FIRST_CONTENT = histogram(
    "time_to_first_content_seconds",
    "Seconds from arrival to sending the first token that is neither reasoning nor a tool call; "
    "answers with either count if they are streamed.",
)
TPOT = histogram(
    "request_time_per_output_token_seconds",
    "Mean seconds per output token after the first, of one request.",
    "class", buckets=GAP_S,
)  # fmt: skip
MTPOT = histogram(
    "request_max_time_per_output_token_seconds",
    "Longest gap in seconds between two messages of one request; 0 for a single message.",
    "class", buckets=GAP_S,
)  # fmt: skip
GAP = histogram(
    "inter_token_latency_seconds",
    "Seconds per token after the first message: the gap before a message divided by its tokens, "
    "counted once per token.",
    buckets=GAP_S,
)  # fmt: skip
E2E = histogram(
    "e2e_request_latency_seconds",
    "Seconds from arrival to sending the end of the response, of accepted requests.",
    "class",
)
QUEUE = histogram("request_queue_time_seconds", "Seconds from arrival to placement on a worker.")
PREFILL = histogram("request_prefill_time_seconds", "Seconds from placement to the first token.")
DECODE = histogram("request_decode_time_seconds", "Seconds from the first token to the last.")
RUNNING = gauge("num_requests_running", "Requests placed on a worker.")
WAITING = gauge("num_requests_waiting", "Requests not placed on a worker yet.")
ADAPTERS = gauge(
    "lora_requests_info",
    "The time in unix seconds while LoRA adapters are loaded; the labels are the number of "
    "adapters, and those of running and of waiting requests, at most 64 of each, with commas.",
    "max_lora", "running_lora_adapters", "waiting_lora_adapters",
)  # fmt: skip
PROMPT_TOKENS = counter("prompt_tokens", "Prompt tokens of accepted requests.")
GENERATION_TOKENS = counter("generation_tokens", "Output tokens that reached the gateway.")
SUCCESS = counter(
    "request_success", "Ended requests, by reason; `rejected`: refused by the scheduler.",
    "finished_reason",
)  # fmt: skip
SLA = counter(
    "sla_requests",
    "Ended and refused requests, by SLA class, outcome (met, missed) and cause of the miss: "
    "rejected, queued, prefill, preempted, swap-in, decode, client (disconnected); empty if met. "
    "A miss due to a client that reads slowly has the cause prefill or decode.",
    "class", "outcome", "cause",
)  # fmt: skip
GOODPUT_TOKENS = counter("goodput_tokens", "Output tokens of requests that met their SLA.", "class")
RESUBMISSIONS = counter(
    "resubmissions", "Requests submitted to a scheduler again, by what was lost.", "cause"
)
ANNOUNCEMENTS = counter("announcements", "Running requests announced to a new scheduler.")
REFUSALS = counter(
    "refusals", "Requests refused before they were parsed, by the limit reached.", "reason"
)
LIMITS_SHARED = gauge(
    "key_limits_shared",
    "1 while the gateways share the limits of API keys in Redis, 0 while each keeps to its part; "
    "none without gateway.limits_url.",
)
PEERS_MISSING = gauge(
    "metrics_peers_missing", "Configured peers without metrics in the last scrape."
)
CLIENT_FORECASTS = counter(
    "client_forecasts",
    "Requests with a length forecast sent to the client, by whether the first 90 % interval covers "
    "the final length (yes, no).",
    "covered",
)  # fmt: skip
TTFT_PROMISES = counter(
    "client_ttft_promises",
    "Times to first token that clients were promised, by whether they were kept (yes, no).",
    "kept",
)  # fmt: skip
SLA_FORECASTS = counter(
    "client_sla_forecasts",
    "Requests with an SLA forecast sent to the client (held, broken), by outcome (met, missed).",
    "foreseen", "outcome",
)  # fmt: skip
INVALID_MESSAGES = invalid_messages("gateway", "ended its stream")

ALL = metrics_in(globals())
