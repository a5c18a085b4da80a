"""What a client can use in place of an endpoint that the server does not have."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

MAX_PATH_CHARS = 100  # of a path that is compared or repeated in an error
MAX_SUGGESTIONS = 3
SIMILARITY = 0.85  # of two paths that one typing error separates

CHAT = "use /v1/chat/completions"
COMPLETIONS = "use /v1/completions"
TEXT_ONLY = "this server only generates text"
STATELESS = "use previous_response_id of /v1/responses to continue a conversation"
NO_BATCHES = "batches are off; start the server with --batch-folder FOLDER"
NO_REALTIME = (
    "WebSockets and the Realtime API are not supported; use /v1/chat/completions or /v1/responses "
    "with stream set to true"
)
NOT_STORED = "chat completions are not stored; use /v1/responses, which are unless store is false"
NO_COMPACTION = (
    "conversations are not compacted; send a shorter input, or set truncation to auto in "
    "/v1/responses"
)
NO_EMBEDDINGS = "embeddings are off; start the server with --set gateway.embeddings=on"
NO_POOLING = "this server has no pooling models; use /v1/embeddings"
SWITCHED_OFF = (NO_BATCHES, NO_EMBEDDINGS)  # advice that holds only while the endpoint is off

# Endpoints of OpenAI, vLLM, SGLang, TGI, Ollama and Anthropic, by the beginning of their path.
UNSERVED: Mapping[str, str] = {
    "/v1/chat/completions": NOT_STORED,
    "/v1/responses": "use /v1/responses and /v1/responses/{id}",
    "/v1/messages/batches": NO_BATCHES,
    "/v1/messages": "use /v1/messages and /v1/messages/count_tokens",
    "/v1/realtime": NO_REALTIME,
    "/realtime": NO_REALTIME,
    "/ws": NO_REALTIME,
    "/v1/assistants": STATELESS,
    "/v1/threads": STATELESS,
    "/v1/conversations": STATELESS,
    "/v1/files": NO_BATCHES,
    "/v1/batches": NO_BATCHES,
    "/v1/uploads": "use /v1/files",
    "/v1/vector_stores": "this server stores no documents",
    "/v1/fine_tuning": "this server does not train models",
    "/v1/embeddings": NO_EMBEDDINGS,
    "/v1/rerank": NO_EMBEDDINGS,
    "/v2/rerank": NO_EMBEDDINGS,
    "/rerank": NO_EMBEDDINGS,
    "/v1/score": NO_EMBEDDINGS,
    "/score": NO_EMBEDDINGS,
    "/pooling": NO_POOLING,
    "/classify": NO_POOLING,
    "/embed": NO_POOLING,
    "/encode": NO_POOLING,
    "/v1/moderations": "this server has no moderation model",
    "/v1/audio": TEXT_ONLY,
    "/v1/images": TEXT_ONLY,
    "/v1/videos": TEXT_ONLY,
    "/invocations": CHAT,
    "/api/chat": CHAT,
    "/api/generate": COMPLETIONS,
    "/api/tags": "use /v1/models",
    "/generate": COMPLETIONS,
    "/generate_stream": f"{COMPLETIONS} with stream set to true",
    "/v1/engines": "use /v1/models",
    "/get_model_info": "use /v1/models",
    "/model_info": "use /v1/models",
    "/info": "use / and /v1/models",
    "/server_info": "use / and /load",
    "/get_server_info": "use / and /load",
    "/health_generate": "use /health",
    "/get_load": "use /load",
}


# The same for methods that a served path does not have.
UNSERVED_METHODS: Mapping[tuple[str, str], str] = {
    ("GET", "/v1/chat/completions"): NOT_STORED,
    ("GET", "/v1/responses"): f"name a response, /v1/responses/{{id}}. {NO_REALTIME}",
    ("POST", "/v1/responses/compact"): NO_COMPACTION,
}


def suggest_endpoint(path: str, served: Sequence[str]) -> str:
    """What to use instead of an unknown path."""
    for beginning, advice in UNSERVED.items():
        asked = path == beginning or path.startswith(f"{beginning}/")
        if asked and not (advice in SWITCHED_OFF and beginning in served):
            return advice
    similar = " or ".join(find_similar(path, served))
    return f"did you mean {similar}?" if similar else "GET / lists the endpoints"


def find_similar(path: str, served: Sequence[str]) -> Sequence[str]:
    """Served paths with a missing or additional part, else those spelled almost alike."""
    requested = path[:MAX_PATH_CHARS].rstrip("/")
    if len(requested) < 2:
        return []
    named = [each for each in served if len(each) > 1]
    parts = [
        each
        for each in named
        if each.endswith(requested) or each.startswith(requested) or requested.endswith(each)
    ]
    similar = parts or get_close_matches(requested, named, MAX_SUGGESTIONS, SIMILARITY)
    return similar[:MAX_SUGGESTIONS]
