"""Metrics of the gateway: requests as their clients see them, each choice separately. Every series
has `model_name`.

Times end when the client's socket accepts the tokens, not when they reach the gateway. The tokens
of an answer that is not streamed count when they reach the gateway. `class` is a configured SLA
class, or `custom` for requests with explicit budgets.
"""

from observability.metrics.metric import GAP_S, counter, gauge, histogram

TTFT = histogram(
    "time_to_first_token_seconds", "Time from a request's arrival to its first token sent.", "class"
)
TPOT = histogram(
    "request_time_per_output_token_seconds",
    "Mean time per token after the first, as sent.",
    "class", buckets=GAP_S,
)  # fmt: skip
MTPOT = histogram(
    "request_max_time_per_output_token_seconds",
    "Longest gap between two messages with tokens, as sent; 0 for a single message.",
    "class", buckets=GAP_S,
)  # fmt: skip
GAP = histogram(
    "inter_token_latency_seconds",
    "Time per token after the first message, as sent: the gap before a message divided by its "
    "tokens, counted once per token.",
    buckets=GAP_S,
)  # fmt: skip
E2E = histogram(
    "e2e_request_latency_seconds",
    "Time from arrival to the end sent, of requests that were not refused.",
    "class",
)
QUEUE = histogram("request_queue_time_seconds", "Time from arrival to placement on a worker.")
PREFILL = histogram("request_prefill_time_seconds", "Time from placement to the first token.")
DECODE = histogram("request_decode_time_seconds", "Time from the first token to the last.")
RUNNING = gauge("num_requests_running", "Choices placed on a worker.")
WAITING = gauge("num_requests_waiting", "Choices not placed yet.")
PROMPT_TOKENS = counter("prompt_tokens", "Prompt tokens of accepted requests.")
GENERATION_TOKENS = counter("generation_tokens", "Output tokens that reached the gateway.")
SUCCESS = counter(
    "request_success", "Ended requests, by reason; `rejected` were refused by the scheduler.",
    "finished_reason",
)  # fmt: skip
SLA = counter(
    "sla_requests",
    "Ended or refused requests, by SLA class, outcome (met, missed) and cause of the miss: "
    "rejected, queued, prefill, preempted, swap-in, decode, or client for a disconnect; empty if "
    "met. A client that reads slowly counts as decode or prefill.",
    "class", "outcome", "cause",
)  # fmt: skip
GOODPUT_TOKENS = counter("goodput_tokens", "Output tokens of requests that met their SLA.", "class")
RESUBMISSIONS = counter("resubmissions", "Requests submitted again, by what was lost.", "cause")
ANNOUNCEMENTS = counter("announcements", "Running requests announced to a new scheduler.")
REFUSALS = counter("refusals", "Requests refused before reading, by the exceeded limit.", "reason")
PEERS_MISSING = gauge(
    "metrics_peers_missing", "Peers whose metrics are missing in the last scrape."
)
CLIENT_FORECASTS = counter(
    "client_forecasts",
    "Choices with forecasts sent to the client, by whether the first 90 % interval covers the "
    "final length (yes, no).",
    "covered",
)  # fmt: skip
TTFT_PROMISES = counter(
    "client_ttft_promises",
    "Promised first-token times sent before the first token, by whether they were kept (yes, no).",
    "kept",
)  # fmt: skip
SLA_FORECASTS = counter(
    "client_sla_forecasts",
    "SLA forecasts sent to clients (held, broken), by outcome (met, missed).",
    "foreseen", "outcome",
)  # fmt: skip

ALL = (
    TTFT, TPOT, MTPOT, GAP, E2E, QUEUE, PREFILL, DECODE, RUNNING, WAITING, PROMPT_TOKENS,
    GENERATION_TOKENS, SUCCESS, SLA, GOODPUT_TOKENS, RESUBMISSIONS, ANNOUNCEMENTS, REFUSALS,
    PEERS_MISSING, CLIENT_FORECASTS, TTFT_PROMISES, SLA_FORECASTS,
)  # fmt: skip
