"""Converts between core types and messages. Decoding raises ValueError for bad values."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import inf, isfinite

from protos.generated import common_pb2, estimator_pb2, predictor_pb2
from services.core import Ending, FinishReason, LiveAnswers, Outcome, Sla
from services.costs import BatchTiming, CostModel, Direction, Neighbours, StepTiming, SwapTiming
from services.forecast import UNCAPPED, Forecast

_REASON_TO_PROTO = {
    reason: common_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}
_REASON_FROM_PROTO = {value: key for key, value in _REASON_TO_PROTO.items()}

_DIRECTION_TO_PROTO = {
    direction: common_pb2.Direction.Value(f"DIRECTION_{direction.name}") for direction in Direction
}
_DIRECTION_FROM_PROTO = {value: key for key, value in _DIRECTION_TO_PROTO.items()}


def encode_reason(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _REASON_TO_PROTO[reason]


def decode_reason(value: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    return _REASON_FROM_PROTO.get(value)


def encode_sla(sla: Sla) -> common_pb2.Sla:
    budgets = {"ttft_s": sla.ttft_s, "tpot_s": sla.tpot_s, "mtpot_s": sla.mtpot_s}
    return common_pb2.Sla(name=sla.name, **{k: v for k, v in budgets.items() if isfinite(v)})


def decode_sla(message: common_pb2.Sla) -> Sla:
    return Sla(
        message.name or "default",
        message.ttft_s if message.HasField("ttft_s") else inf,
        message.tpot_s if message.HasField("tpot_s") else inf,
        message.mtpot_s if message.HasField("mtpot_s") else inf,
    )


def encode_forecast(forecast: Forecast) -> common_pb2.Forecast:
    return common_pb2.Forecast(
        points=forecast.points,
        weights=forecast.weights,
        source=forecast.source,
        version=forecast.version,
        shared_key=forecast.shared_key,
    )


def decode_forecast(message: common_pb2.Forecast, max_tokens: int = UNCAPPED) -> Forecast:
    """The forecast, truncated at `max_tokens` unless it is shared by many requests. Raises
    ValueError if it is not a distribution."""
    points = tuple(message.points)
    weights = tuple(message.weights) or (1 / max(1, len(points)),) * len(points)
    if not all(isfinite(p) for p in (*points, *weights)):
        raise ValueError("forecast points and weights must be finite")
    forecast = Forecast(
        points, weights, UNCAPPED, message.source, message.version, message.shared_key
    )
    return forecast if message.shared_key else forecast.truncated(max_tokens)


def encode_timing(timing: StepTiming) -> common_pb2.StepTiming:
    return common_pb2.StepTiming(
        prefill_tokens=timing.prefill_tokens,
        decode_seqs=timing.decode_seqs,
        context_tokens=timing.context_tokens,
        elapsed_s=timing.elapsed_s,
    )


def decode_timing(message: common_pb2.StepTiming) -> StepTiming:
    return StepTiming(
        message.prefill_tokens, message.decode_seqs, message.context_tokens, message.elapsed_s
    )


def encode_swap(swap: SwapTiming) -> common_pb2.SwapTiming:
    return common_pb2.SwapTiming(
        direction=_DIRECTION_TO_PROTO[swap.direction],
        tokens=swap.tokens,
        elapsed_s=swap.elapsed_s,
        quantize_s=swap.quantize_s,
    )


def decode_swaps(messages: Iterable[common_pb2.SwapTiming]) -> tuple[SwapTiming, ...]:
    """The timings in order, without those of unknown directions."""
    return tuple(
        SwapTiming(direction, m.tokens, m.elapsed_s, m.quantize_s)
        for m in messages
        if (direction := _DIRECTION_FROM_PROTO.get(m.direction))
    )


def encode_batch(batch: BatchTiming) -> estimator_pb2.BatchTiming:
    return estimator_pb2.BatchTiming(**asdict(batch))


def decode_batch(message: estimator_pb2.BatchTiming) -> BatchTiming:
    return BatchTiming(
        message.seqs, message.length_tokens, message.generated_tokens, message.elapsed_s
    )


def encode_cost_model(worker_id: str, model: CostModel) -> estimator_pb2.CostModel:
    return estimator_pb2.CostModel(
        worker_id=worker_id,
        version=model.version,
        source=model.source,
        base_s=model.base_s,
        prefill_token_s=model.prefill_token_s,
        decode_seq_s=model.decode_seq_s,
        context_token_s=model.context_token_s,
        error_p50=model.error_p50,
        error_p90=model.error_p90,
        samples=model.samples,
        offload_token_s=model.offload_token_s,
        upload_token_s=model.upload_token_s,
        quantize_token_s=model.quantize_token_s,
        error_steps=model.error_steps,
        neighbours=model.neighbours.rows,
        neighbours_asked=model.neighbours.k,
        tokens_per_step=model.tokens_per_step,
    )


def decode_cost_model(message: estimator_pb2.CostModel) -> CostModel:
    """Raises ValueError for invalid neighbours. Does not validate the times."""
    return CostModel(
        base_s=message.base_s,
        prefill_token_s=message.prefill_token_s,
        decode_seq_s=message.decode_seq_s,
        context_token_s=message.context_token_s,
        version=message.version,
        source=message.source,
        error_p50=message.error_p50,
        error_p90=message.error_p90,
        samples=message.samples,
        offload_token_s=message.offload_token_s,
        upload_token_s=message.upload_token_s,
        quantize_token_s=message.quantize_token_s,
        error_steps=message.error_steps,
        neighbours=Neighbours(
            tuple(message.neighbours), message.neighbours_asked or Neighbours().k
        ),
        tokens_per_step=decode_tokens_per_step(message.tokens_per_step),
    )


def decode_tokens_per_step(tokens: float) -> float:
    """At least 1, which stands for missing numbers and NaN, too."""
    return tokens if 1.0 < tokens < inf else 1.0


def encode_outcome(outcome: Outcome) -> predictor_pb2.Outcome:
    return predictor_pb2.Outcome(
        request_id=outcome.request_id,
        model=outcome.model,
        application=outcome.application,
        prompt_tokens=outcome.prompt_tokens,
        output_tokens=outcome.output_tokens,
        max_tokens=outcome.max_tokens,
        reason=encode_reason(outcome.reason),
        e2e_s=outcome.e2e_s,
        preemptions=outcome.preemptions,
        key_name=outcome.key_name,
    )


def encode_live_answers(answers: LiveAnswers) -> predictor_pb2.LiveAnswers:
    return predictor_pb2.LiveAnswers(
        model=answers.model, application=answers.application, output_tokens=answers.output_tokens
    )


def encode_endings(
    endings: Sequence[Ending], reporter: str, live: Iterable[LiveAnswers] = ()
) -> predictor_pb2.ObserveOutcomesRequest:
    """`reporter`: the name of this process, which is stored with its outcomes."""
    return predictor_pb2.ObserveOutcomesRequest(
        outcomes=[encode_outcome(each) for each in endings if isinstance(each, Outcome)],
        live=map(encode_live_answers, live),
        ended_ids=[each for each in endings if isinstance(each, str)],
        reporter=reporter,
    )


def decode_live_answers(message: predictor_pb2.LiveAnswers) -> LiveAnswers:
    return LiveAnswers(message.model, message.application, tuple(message.output_tokens))


def decode_outcome(message: predictor_pb2.Outcome, reporter: str = "") -> Outcome:
    """`reporter`: the process that sent it."""
    return Outcome(
        message.request_id,
        message.model,
        message.application,
        message.prompt_tokens,
        message.output_tokens,
        message.max_tokens,
        decode_reason(message.reason) or FinishReason.ERROR,
        message.e2e_s,
        message.preemptions,
        message.key_name,
        reporter,
    )
