"""What the gateway counts: requests as their clients saw them, each choice of one by itself. Every
series has `model_name`.

Times end when the client's socket took the tokens, not when they reached the gateway. An answer
that is sent whole shows its client nothing before its end: its tokens count as they reach the
gateway.
`class` is an SLA class of the config, or `custom` for requests that bring budgets of their own.
"""

from observability.metrics.metric import GAP_S, counter, gauge, histogram

TTFT = histogram(
    "time_to_first_token_seconds", "From a request's arrival to its first token, sent.", "class"
)
TPOT = histogram(
    "request_time_per_output_token_seconds",
    "Mean time a token after a request's first, as sent.",
    "class", buckets=GAP_S,
)  # fmt: skip
MTPOT = histogram(
    "request_max_time_per_output_token_seconds",
    "Longest gap between two messages with a request's tokens, as sent; 0 where one had them all.",
    "class", buckets=GAP_S,
)  # fmt: skip
GAP = histogram(
    "inter_token_latency_seconds",
    "Time a token after a request's first message: once each, the gap before its message over that "
    "message's tokens, as sent.",
    buckets=GAP_S,
)  # fmt: skip
E2E = histogram(
    "e2e_request_latency_seconds",
    "From a request's arrival until its client had its end; of those not refused.",
    "class",
)
QUEUE = histogram(
    "request_queue_time_seconds", "From a request's arrival to its placement on a worker."
)
PREFILL = histogram(
    "request_prefill_time_seconds", "From a request's placement to its first token."
)
DECODE = histogram("request_decode_time_seconds", "From a request's first token to its last.")
RUNNING = gauge("num_requests_running", "Requests placed on a worker, one a choice.")
WAITING = gauge("num_requests_waiting", "Requests not placed yet, one a choice.")
PROMPT_TOKENS = counter("prompt_tokens", "Prompt tokens of requests taken in.")
GENERATION_TOKENS = counter("generation_tokens", "Output tokens that reached the gateway.")
SUCCESS = counter(
    "request_success", "Requests that ended, by why; `rejected` are those refused after arrival.",
    "finished_reason",
)  # fmt: skip
SLA = counter(
    "sla_requests",
    "Requests that ended or were refused, by SLA class, whether it was kept (met, missed), and "
    "what broke it: rejected, queued, prefill, preempted, swap-in, decode or client, who left; "
    "empty where it was kept. A client that takes its tokens slowly shows as decode or prefill.",
    "class", "outcome", "cause",
)  # fmt: skip
GOODPUT_TOKENS = counter("goodput_tokens", "Output tokens of requests whose SLA was kept.", "class")
RESUBMISSIONS = counter(
    "resubmissions", "Requests submitted again, by what of them was lost.", "cause"
)
ANNOUNCEMENTS = counter(
    "announcements", "Requests a new scheduler was told of, that went on meanwhile."
)
REFUSALS = counter("refusals", "Requests refused unread, by what stood in their way.", "bar")
PEERS_MISSING = gauge(
    "metrics_peers_missing", "Peers whose metrics the last scrape did not get in time."
)
FORECAST_TOLD = counter(
    "client_forecasts",
    "Requests whose client was told their foreseen end at the start, by whether the length came "
    "to lie within the 90 % interval (yes, no).",
    "covered",
)  # fmt: skip
PROMISED_TTFT = counter(
    "client_ttft_promises",
    "First tokens promised to a client who asked before any had come, by whether they came by then "
    "(yes, no).",
    "kept",
)  # fmt: skip
SLA_FORESEEN = counter(
    "client_sla_forecasts",
    "SLA verdicts foreseen for a client who asked (held, broken), by what came (met, missed).",
    "foreseen", "outcome",
)  # fmt: skip

ALL = (
    TTFT, TPOT, MTPOT, GAP, E2E, QUEUE, PREFILL, DECODE, RUNNING, WAITING, PROMPT_TOKENS,
    GENERATION_TOKENS, SUCCESS, SLA, GOODPUT_TOKENS, RESUBMISSIONS, ANNOUNCEMENTS, REFUSALS,
    PEERS_MISSING, FORECAST_TOLD, PROMISED_TTFT, SLA_FORESEEN,
)  # fmt: skip
