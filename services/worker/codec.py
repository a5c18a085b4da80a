"""Translates between the worker's types and its messages. Decoding raises ValueError for bad
values."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protos.generated import common_pb2, scheduler_pb2, worker_pb2
from services.costs import StepTiming, SwapTiming
from services.runtime.codecs.common import encode_reason, encode_swap, encode_timing
from services.worker.config import WorkerConfig
from services.worker.requests.types.batch import NewToken, TokenLogprobs
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt, SamplingParams, SourceText
from services.worker.requests.types.scores import Opening


def decode_prompt(message: worker_pb2.Prompt, origin: str) -> Prompt:
    return Prompt(
        message.request_id,
        tuple(message.token_ids),
        message.prompt_tokens,
        message.max_tokens,
        _decode_sampling(message.sampling),
        origin,
        message.cache_salt,
        message.traceparent,
        message.adapter,
    )


def _decode_sampling(message: common_pb2.Sampling) -> SamplingParams:
    """The fields that are set; missing ones keep their defaults."""
    known = SamplingParams.__dataclass_fields__
    given = {
        field.name: _SEVERAL[field.name](value) if field.name in _SEVERAL else value
        for field, value in message.ListFields()
        if field.name in known
    }
    return SamplingParams(**given)


# Fields that are messages or have several values, as immutable tuples.
_SEVERAL: Mapping[str, Callable[[Any], Any]] = {
    "stop_token_ids": tuple,
    "logit_bias": lambda bias: tuple(sorted(bias.items())),
    "allowed_token_ids": tuple,
    "bad_tokens": lambda bad: tuple(tuple(sequence.ids) for sequence in bad),
    "source": lambda source: SourceText(
        source.kind,
        source.text,
        source.whitespace if source.HasField("whitespace") else None,
        source.behind_reasoning,
    ),
}


def extend_tokens(message: worker_pb2.RequestTokens, token: NewToken) -> None:
    """Appends a token that follows those already in the message."""
    if token.opening is not None and not message.token_ids:
        _begin(message, token.opening)
    message.token_ids.append(token.token_id)
    if token.logprobs is not None:
        message.logprobs.append(_encode_logprobs(token.token_id, token.logprobs))
    if token.finish is not None:
        message.finish_reason = encode_reason(token.finish)


def _begin(message: worker_pb2.RequestTokens, opening: Opening) -> None:
    message.cached_tokens = opening.cached_tokens
    if opening.prompt_logprobs is not None:
        columns = (column.tolist() for column in opening.prompt_logprobs)
        message.prompt_logprobs.extend(
            common_pb2.TokenLogprob(token_id=token, logprob=logprob, top_ids=ids, top_logprobs=top)
            for token, logprob, ids, top in zip(*columns, strict=True)
        )


def _encode_logprobs(token_id: int, logprobs: TokenLogprobs) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token_id=token_id,
        logprob=logprobs.chosen,
        top_ids=logprobs.top_ids,
        top_logprobs=logprobs.top,
    )


def encode_error(message: str) -> worker_pb2.RequestTokens:
    """The error fields of a message. Its other fields are already set."""
    return worker_pb2.RequestTokens(finish_reason=common_pb2.FINISH_REASON_ERROR, message=message)


def encode_refusal(why: str) -> worker_pb2.RequestTokens:
    """The error fields for a request that can never run here."""
    refusal = encode_error(why)
    refusal.refused = True
    return refusal


def encode_adapters(held: Mapping[str, str]) -> list[scheduler_pb2.Adapter]:
    """Adapters with their folders, by name."""
    return [scheduler_pb2.Adapter(name=name, path=path) for name, path in held.items()]


def encode_hello(
    config: WorkerConfig,
    limits: Limits,
    placement: str,
    kv_bytes_per_token: int = 0,
    profile: Sequence[StepTiming] = (),
    swaps: Sequence[SwapTiming] = (),
    start: str = "",
) -> scheduler_pb2.WorkerHello:
    """The hello of an engine with these limits; `placement` and `start` are for people."""
    return scheduler_pb2.WorkerHello(
        worker_id=config.worker_id,
        address=config.advertise or config.address,
        model=config.model_name,
        block_tokens=limits.block_tokens,
        kv_tokens=limits.kv_blocks * limits.block_tokens,
        max_running=limits.max_running,
        max_context_tokens=limits.max_context_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
        host_tokens=limits.host_blocks * limits.block_tokens,
        profile=[encode_timing(timing) for timing in profile],
        swaps=[encode_swap(swap) for swap in swaps],
        start=start,
        placement=placement,
        max_batch_tokens=limits.max_batch_tokens,
        report_every_steps=limits.report_every_steps,
        adapter_slots=limits.adapter_slots,
        adapter_turn_steps=limits.adapter_turn_steps,
    )
