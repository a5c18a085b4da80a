"""Names from OpenTelemetry's semantic conventions for generative AI.

Defined here because opentelemetry-semantic-conventions marks them as unstable.
"""

from observability.tracing import Measure

PROVIDER = "foretoken"
CHAT, TEXT_COMPLETION = "chat", "text_completion"  # operations

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"

# The conventions specify these buckets; metrics of the catalogue have a higher resolution.
REQUEST_DURATION = Measure(
    "gen_ai.server.request.duration",
    "Generative AI server request duration such as time-to-last byte or last output token.",
    (
        0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
    ),
)  # fmt: skip
TIME_TO_FIRST_TOKEN = Measure(
    "gen_ai.server.time_to_first_token",
    "Time to generate first token for successful responses.",
    (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ),
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN = Measure(
    "gen_ai.server.time_per_output_token",
    "Time per output token generated after the first token for successful responses.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
