"""Messages to the scheduler and the workers, and the reading of theirs. Pure."""

from gateway.types.client_request import ClientRequest
from gateway.types.constraint import Constraint, ConstraintKind
from gateway.types.errors import MIN_RETRY_S, ContextOverflow
from gateway.types.forecasts import SchedulerForecast
from gateway.types.generation import GenerationRequest, Sampling
from protos.generated import common_pb2, scheduler_pb2, worker_pb2
from services.core import FinishReason
from services.runtime.codecs.common import decode_forecast, encode_reason, encode_sla
from services.runtime.errors import Code, InvalidArgument, ServiceError

MAX_POPULATION_CHARS = 256  # that the predictor accepts
OVERLOADED = (scheduler_pb2.REJECT_REASON_QUEUE_FULL, scheduler_pb2.REJECT_REASON_TOO_LATE)


def new_request(
    wire_id: str,
    request: GenerationRequest,
    delivered_tokens: int,
    now_s: float,
    worker_id: str = "",
    prefix_hashes: bytes = b"",
    length_quantile: float = 0.0,
) -> scheduler_pb2.SubmitMessage:
    """A submission with the request's true age. With `worker_id`, it announces a request that this
    worker still runs. `length_quantile`: 0 without a need for the answer's length."""
    message = scheduler_pb2.NewRequest(
        request_id=wire_id,
        model=request.client.model,
        application=_population(request.client),
        prompt_tokens=request.prompt_tokens,
        delivered_tokens=delivered_tokens,
        max_tokens=request.sampling.max_tokens,
        sla=encode_sla(request.sla),
        age_s=now_s - request.arrival_s,
        text=common_pb2.PromptText(
            instruction=request.instruction,
            user_input=request.user_input,
            answer_tokens=request.answer_tokens,
        ),
        worker_id=worker_id,
        prefix_hashes=prefix_hashes,
        tenant=request.tenant,
        weight=request.weight,
        include_forecast=request.client.include_forecast,
        traceparent=request.traceparent,
        priority=request.client.priority,
        min_tokens=request.sampling.least_tokens,
        key_name=request.key_name,
        adapter=request.client.adapter,
        length_quantile=length_quantile,
    )
    if request.deadline_s < float("inf"):
        message.deadline_in_s = max(0.0, request.deadline_s - now_s)
    return scheduler_pb2.SubmitMessage(request=message)


def cancel(wire_id: str, reason: FinishReason, output_tokens: int) -> scheduler_pb2.SubmitMessage:
    return scheduler_pb2.SubmitMessage(
        cancel=scheduler_pb2.CancelRequest(
            request_id=wire_id, reason=encode_reason(reason), output_tokens=output_tokens
        )
    )


def prompt(
    wire_id: str,
    request: GenerationRequest,
    choice: int,
    delivered: list[int],
    scored: bool = False,
) -> worker_pb2.WorkerInput:
    """The prompt of one choice, followed by its output so far. `scored`: the prompt's
    log-probabilities are known already."""
    return worker_pb2.WorkerInput(
        prompt=worker_pb2.Prompt(
            request_id=wire_id,
            token_ids=[*request.prompt_ids, *delivered],
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            sampling=_encode_sampling(request.sampling, choice, scored),
            cache_salt=request.prefix_salt,
            traceparent=request.traceparent,
            adapter=request.client.adapter,
        )
    )


def _population(client: ClientRequest) -> str:
    """The application by which answer lengths are learned: each adapter has its own."""
    if not client.adapter:
        return client.application
    return f"{client.application}@{client.adapter}"[-MAX_POPULATION_CHARS:]


def _encode_sampling(sampling: Sampling, choice: int, scored: bool) -> common_pb2.Sampling:
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
        grammar=sampling.grammar,
        source=_encode_source(sampling.constraint),
    )


def _encode_source(constraint: Constraint | None) -> common_pb2.GrammarSource | None:
    """None where other servers have nothing like it: for calls of tools."""
    if constraint is None or constraint.kind is ConstraintKind.TOOL_CALLS:
        return None
    return common_pb2.GrammarSource(
        kind=constraint.kind,
        text=constraint.source,
        whitespace=constraint.whitespace,
        behind_reasoning=bool(constraint.after),
    )


def read_forecast(message: scheduler_pb2.ForecastUpdate) -> SchedulerForecast:
    """Raises InvalidArgument for impossible values."""
    ttft_s = message.ttft_s if message.HasField("ttft_s") else None
    try:
        return SchedulerForecast(decode_forecast(message.forecast), message.token_s, ttft_s)
    except ValueError as error:
        raise InvalidArgument("forecast_update", str(error)) from None


def read_rejection(rejected: scheduler_pb2.Rejected, drain_s: float) -> ServiceError:
    """The error for the client of a rejected request."""
    message = rejected.message or "the scheduler refused the request"
    if rejected.reason == scheduler_pb2.REJECT_REASON_TOO_LONG:
        sentence = f"This model's maximum context length is exceeded: {message}"
        return ContextOverflow("max_tokens", sentence)
    if rejected.reason == scheduler_pb2.REJECT_REASON_NO_MODEL:
        return ServiceError(Code.NOT_FOUND, message)
    retry_after_s = rejected.retry_after_s or max(MIN_RETRY_S, drain_s)
    code = Code.RESOURCE_EXHAUSTED if rejected.reason in OVERLOADED else Code.UNAVAILABLE
    return ServiceError(code, message, retry_after_s)
