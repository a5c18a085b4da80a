"""What a gateway may send: checked before any of it is kept. Pure.

A prompt that no worker can run is refused by itself. These checks are for messages that no gateway
sends: they end its stream.
"""

from protos.generated import worker_pb2
from services.runtime.border import COUNT, Bounds, check_bounds, check_name
from services.runtime.errors import InvalidArgument
from services.worker.requests.types.prompt import MAX_GRAMMAR

MAX_IDS = 2**22  # of a prompt and its output: 8 times the longest context there is
MAX_SOURCE_CHARS = 4 * MAX_GRAMMAR  # of what a grammar was compiled from
BOUNDS: Bounds = {"prompt_tokens": COUNT, "max_tokens": COUNT}


def check_prompt(prompt: worker_pb2.Prompt) -> None:
    """Raises InvalidArgument, which names the field. O(1)."""
    check_name("request_id", prompt.request_id)
    for field in ("cache_salt", "traceparent", "adapter"):
        check_name(field, getattr(prompt, field), least=0)
    check_bounds(prompt, BOUNDS)
    if len(prompt.token_ids) > MAX_IDS:
        raise InvalidArgument(
            "token_ids", f"must be at most {MAX_IDS}, got {len(prompt.token_ids)}"
        )
    if (chars := len(prompt.sampling.source.text)) > MAX_SOURCE_CHARS:
        sentence = f"must have at most {MAX_SOURCE_CHARS} characters, got {chars}"
        raise InvalidArgument("sampling.source.text", sentence)
