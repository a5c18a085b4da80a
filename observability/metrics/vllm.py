"""vLLM's names of metrics that vLLM has too, for dashboards and queries made for vLLM."""

from collections.abc import Mapping

from observability.metrics.catalogue import CATALOGUE
from observability.metrics.metric import PREFIX

VLLM_PREFIX = "vllm:"
# Names that are equal in vLLM, without prefix and `_total`.
SAME = frozenset(
    (
        "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "num_requests_running", "num_requests_waiting",
        "kv_cache_usage_perc", "num_preemptions", "prompt_tokens", "generation_tokens",
        "request_success", "prefix_cache_queries", "prefix_cache_hits", "cache_config_info",
        "lora_requests_info",
    )
)  # fmt: skip

# What endpoint pickers of the Gateway API Inference Extension read of a model server.
MODEL_SERVER = frozenset(
    (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info",
        "lora_requests_info",
    )
)  # fmt: skip

# vLLM's names by ours, both with prefix.
ALIASES: Mapping[str, str] = {
    PREFIX + metric.name: VLLM_PREFIX + (metric.vllm or metric.name)
    for metrics in CATALOGUE.values()
    for metric in metrics
    if metric.vllm or metric.name in SAME
}
MODEL_SERVER_ALIASES: Mapping[str, str] = {
    name: alias for name, alias in ALIASES.items() if name.removeprefix(PREFIX) in MODEL_SERVER
}
