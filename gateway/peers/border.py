"""What workers and the scheduler may send: checked before sessions use it. Pure."""

from collections.abc import Sequence
from math import inf, isnan

from protos.generated import common_pb2, scheduler_pb2, worker_pb2
from services.runtime.border import COUNT, Bounds, check_bounds, check_name
from services.runtime.errors import InvalidArgument

MAX_MESSAGE_CHARS = 2**16  # of an error
MAX_WARNINGS, MAX_WARNING_CHARS = 16, 1_024
# Times may be infinite, and not NaN.
FLEET: Bounds = {"drain_s": (0, inf), "prefix_blocks": COUNT}
WORKER: Bounds = {"kv_tokens": (1, 2**40), "max_context_tokens": (1, 2**31)}
LENGTH_BOUND: Bounds = {"output_tokens": (1, 2**31 - 1)}
FINISHED: Bounds = {"output_tokens": COUNT}
REJECTED: Bounds = {"retry_after_s": (0, inf)}

Scores = Sequence[common_pb2.TokenLogprob]


def check_tokens(batch: worker_pb2.TokenBatch, vocabulary_tokens: int) -> None:
    """Raises InvalidArgument, which names the field. O(tokens), in C for plain ones."""
    for tokens in batch.requests:
        ids = tokens.token_ids
        if ids and max(ids) >= vocabulary_tokens:
            sentence = f"must be below {vocabulary_tokens}, the size of the vocabulary"
            raise InvalidArgument("token_ids", f"{sentence}, got {max(ids)}")
        if tokens.finish_reason and len(tokens.message) > MAX_MESSAGE_CHARS:
            raise InvalidArgument("message", f"must have at most {MAX_MESSAGE_CHARS} characters")
        if tokens.logprobs:
            _check_scores("logprobs", tokens.logprobs, len(ids))
        if tokens.prompt_logprobs:
            _check_scores("prompt_logprobs", tokens.prompt_logprobs, inf)


def check_cached(cached_tokens: int, prompt_tokens: int) -> None:
    """Raises InvalidArgument for more cached tokens than the prompt has."""
    if cached_tokens > prompt_tokens:
        sentence = f"must be at most {prompt_tokens}, the tokens of the prompt, got {cached_tokens}"
        raise InvalidArgument("cached_tokens", sentence)


def _check_scores(field: str, scores: Scores, most: float) -> None:
    if len(scores) > most:
        raise InvalidArgument(field, f"must be at most one for each token, got {len(scores)}")
    for score in scores:
        top = score.top_logprobs
        if len(score.top_ids) != len(top):
            raise InvalidArgument(field, "has top_ids and top_logprobs of different lengths")
        if isnan(score.logprob) or any(map(isnan, top)):
            raise InvalidArgument(field, "must not be NaN")


def check_event(event: scheduler_pb2.SchedulerEvent) -> None:
    """Raises InvalidArgument, which names the field. O(workers) for a fleet, else O(1)."""
    if event.HasField("fleet"):
        _check_fleet(event.fleet)
        return
    request = event.request
    match request.WhichOneof("kind"):
        case "placed":
            check_name("placed.worker_address", request.placed.worker_address)
        case "length_bound":
            check_bounds(request.length_bound, LENGTH_BOUND)
        case "finished":
            check_bounds(request.finished, FINISHED)
        case "rejected":
            check_bounds(request.rejected, REJECTED)


def _check_fleet(fleet: scheduler_pb2.FleetView) -> None:
    check_bounds(fleet, FLEET)
    chars = max(map(len, fleet.warnings), default=0)
    if len(fleet.warnings) > MAX_WARNINGS or chars > MAX_WARNING_CHARS:
        sentence = f"must be at most {MAX_WARNINGS} of {MAX_WARNING_CHARS} characters"
        raise InvalidArgument("fleet.warnings", sentence)
    for worker in fleet.workers:
        check_name("fleet.workers.address", worker.address)
        check_bounds(worker, WORKER)
