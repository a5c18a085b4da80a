"""What the gateway says to scheduler and workers, and how it reads their answers. Pure."""

from gateway.requests.errors import ContextOverflow
from gateway.requests.parser import Generation
from gateway.requests.sampling import Sampling
from gateway.sessions.foresight import Foretold
from protos.generated import common_pb2, scheduler_pb2, worker_pb2
from services.core import FinishReason
from services.runtime.codecs.common import decode_forecast, encode_reason, encode_sla
from services.runtime.errors import Code, ServiceError

OVERLOADED = (scheduler_pb2.REJECT_REASON_QUEUE_FULL, scheduler_pb2.REJECT_REASON_TOO_LATE)
MIN_RETRY_S = 1.0  # what a refused client is told at least, where no estimate came


def submit_hello(gateway_id: str) -> scheduler_pb2.SubmitMessage:
    return scheduler_pb2.SubmitMessage(hello=scheduler_pb2.SubmitHello(gateway_id=gateway_id))


def worker_hello(gateway_id: str) -> worker_pb2.WorkerInput:
    return worker_pb2.WorkerInput(hello=worker_pb2.StreamHello(gateway_id=gateway_id))


def new_request(
    wire_id: str,
    generation: Generation,
    delivered_tokens: int,
    now_s: float,
    worker_id: str = "",
    prefix_hashes: bytes = b"",
) -> scheduler_pb2.SubmitMessage:
    """A request with its true age, whether it is new, resubmitted or, with the worker that has
    it, only told of again."""
    request = scheduler_pb2.NewRequest(
        request_id=wire_id,
        model=generation.model,
        application=generation.application,
        prompt_tokens=generation.prompt_tokens,
        delivered_tokens=delivered_tokens,
        max_tokens=generation.sampling.max_tokens,
        sla=encode_sla(generation.sla),
        age_s=now_s - generation.arrival_s,
        text=common_pb2.PromptText(
            instruction=generation.instruction,
            user_input=generation.user_input,
            answer_tokens=generation.answer_tokens,
        ),
        worker_id=worker_id,
        prefix_hashes=prefix_hashes,
        tenant=generation.tenant,
        include_forecast=generation.include_forecast,
        traceparent=generation.traceparent,
        priority=generation.priority,
    )
    if generation.deadline_s < float("inf"):
        request.deadline_in_s = max(0.0, generation.deadline_s - now_s)
    return scheduler_pb2.SubmitMessage(request=request)


def cancel(wire_id: str, reason: FinishReason, output_tokens: int) -> scheduler_pb2.SubmitMessage:
    return scheduler_pb2.SubmitMessage(
        cancel=scheduler_pb2.CancelRequest(
            request_id=wire_id, reason=encode_reason(reason), output_tokens=output_tokens
        )
    )


def prompt(
    wire_id: str,
    generation: Generation,
    choice: int,
    delivered: list[int],
    scored: bool = False,
) -> worker_pb2.WorkerInput:
    """The prompt of one choice, with the output it has so far behind it; `scored`: its log-
    probabilities, where they were asked for, are known."""
    return worker_pb2.WorkerInput(
        prompt=worker_pb2.Prompt(
            request_id=wire_id,
            token_ids=[*generation.prompt_ids, *delivered],
            prompt_tokens=generation.prompt_tokens,
            max_tokens=generation.sampling.max_tokens,
            sampling=_resolved(generation.sampling, choice, scored),
            cache_salt=generation.cache_salt,
            traceparent=generation.traceparent,
        )
    )


def _resolved(sampling: Sampling, choice: int, scored: bool) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.choice_seed(choice),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        ignore_eos=sampling.ignore_eos,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logprobs=sampling.logprobs,
        n=1,
        stop_token_ids=sampling.stop_token_ids,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids,
        bad_tokens=[common_pb2.TokenIds(ids=ids) for ids in sampling.bad_tokens],
        prompt_logprobs=None if scored else sampling.prompt_logprobs,
    )


def foretold(message: scheduler_pb2.ForecastUpdate) -> Foretold:
    """The scheduler's word on what is to come; raises ValueError where it can't be."""
    ttft_s = message.ttft_s if message.HasField("ttft_s") else None
    return Foretold(decode_forecast(message.forecast), message.token_s, ttft_s)


def rejection(rejected: scheduler_pb2.Rejected, drain_s: float) -> ServiceError:
    """The scheduler's no, as its client reads it."""
    message = rejected.message or "the scheduler refused the request"
    if rejected.reason == scheduler_pb2.REJECT_REASON_TOO_LONG:
        told = f"This model's maximum context length is exceeded: {message}"
        return ContextOverflow("max_tokens", told)
    if rejected.reason == scheduler_pb2.REJECT_REASON_NO_MODEL:
        return ServiceError(Code.NOT_FOUND, message)
    retry_after_s = rejected.retry_after_s or max(MIN_RETRY_S, drain_s)
    code = Code.RESOURCE_EXHAUSTED if rejected.reason in OVERLOADED else Code.UNAVAILABLE
    return ServiceError(code, message, retry_after_s)
