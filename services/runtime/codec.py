"""Between the nouns and their messages. Decoding trusts nothing: bad values raise ValueError."""

from collections.abc import Iterable
from math import ceil, inf, isfinite

from protos import common_pb2, estimator_pb2, predictor_pb2, scheduler_pb2
from services.core import (
    Completion,
    CostModel,
    Direction,
    FinishReason,
    Grant,
    KVCosts,
    Outcome,
    Pause,
    Plan,
    Progress,
    Report,
    Residency,
    Sla,
    Standing,
    StepTiming,
    SwapTiming,
    WorkerView,
)
from services.forecast import Forecast

_REASON_TO_PROTO: dict[FinishReason, common_pb2.FinishReason.ValueType] = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.DEADLINE: common_pb2.FINISH_REASON_DEADLINE,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_REASON_FROM_PROTO = {value: key for key, value in _REASON_TO_PROTO.items()}

_RESIDENCY_TO_PROTO: dict[Residency, scheduler_pb2.Residency.ValueType] = {
    Residency.KEEP: scheduler_pb2.RESIDENCY_KEEP,
    Residency.OFFLOAD: scheduler_pb2.RESIDENCY_OFFLOAD,
    Residency.DROP: scheduler_pb2.RESIDENCY_DROP,
}
_RESIDENCY_FROM_PROTO = {value: key for key, value in _RESIDENCY_TO_PROTO.items()}

_DIRECTION_TO_PROTO: dict[Direction, common_pb2.Direction.ValueType] = {
    Direction.OFFLOAD: common_pb2.DIRECTION_OFFLOAD,
    Direction.UPLOAD: common_pb2.DIRECTION_UPLOAD,
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


def decode_forecast(message: common_pb2.Forecast, max_tokens: int | None = None) -> Forecast:
    """The forecast, cut at `max_tokens` if given; raises ValueError where it is no distribution."""
    points = tuple(message.points)
    weights = tuple(message.weights) or (1 / max(1, len(points)),) * len(points)
    if not all(isfinite(p) for p in (*points, *weights)):
        raise ValueError("forecast points and weights must be finite")
    reach = ceil(points[-1]) if points else 1
    forecast = Forecast(points, weights, reach, message.source, message.version, message.shared_key)
    return forecast if max_tokens is None else forecast.truncated(max_tokens)


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
        direction=_DIRECTION_TO_PROTO[swap.direction], tokens=swap.tokens, elapsed_s=swap.elapsed_s
    )


def decode_swaps(messages: Iterable[common_pb2.SwapTiming]) -> tuple[SwapTiming, ...]:
    """In order, without those of a direction that is not known here."""
    known = ((_DIRECTION_FROM_PROTO.get(m.direction), m) for m in messages)
    return tuple(SwapTiming(way, m.tokens, m.elapsed_s) for way, m in known if way)


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
    )


def decode_cost_model(message: estimator_pb2.CostModel) -> CostModel:
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
    )


def encode_plan(plan: Plan) -> scheduler_pb2.Plan:
    return scheduler_pb2.Plan(
        seq=plan.seq,
        admit=[_encode_grant(g) for g in plan.admit],
        extend=[_encode_grant(g) for g in plan.extend],
        pause=[
            scheduler_pb2.Pause(request_id=p.request_id, residency=_RESIDENCY_TO_PROTO[p.residency])
            for p in plan.pause
        ],
        prefetch=plan.prefetch,
        cancel=plan.cancel,
        victims=plan.victims,
        order=[
            scheduler_pb2.Standing(request_id=s.request_id, wait_s=s.wait_s) for s in plan.order
        ],
        residency=plan.residency,
        costs=_encode_costs(plan.costs),
    )


def decode_plan(message: scheduler_pb2.Plan) -> Plan:
    return Plan(
        seq=message.seq,
        admit=tuple(Grant(g.request_id, g.limit_tokens) for g in message.admit),
        extend=tuple(Grant(g.request_id, g.limit_tokens) for g in message.extend),
        pause=tuple(
            Pause(p.request_id, _RESIDENCY_FROM_PROTO.get(p.residency, Residency.KEEP))
            for p in message.pause
        ),
        prefetch=tuple(message.prefetch),
        cancel=tuple(message.cancel),
        victims=tuple(message.victims),
        order=tuple(Standing(s.request_id, _not_negative(s.wait_s)) for s in message.order),
        residency=message.residency,
        costs=_decode_costs(message.costs),
    )


def _encode_grant(grant: Grant) -> scheduler_pb2.Grant:
    return scheduler_pb2.Grant(request_id=grant.request_id, limit_tokens=grant.limit_tokens)


def _encode_costs(costs: KVCosts) -> scheduler_pb2.KVCosts:
    return scheduler_pb2.KVCosts(
        recompute_token_s=costs.recompute_token_s,
        offload_token_s=costs.offload_token_s,
        upload_token_s=costs.upload_token_s,
    )


def _decode_costs(message: scheduler_pb2.KVCosts) -> KVCosts:
    return KVCosts(
        _not_negative(message.recompute_token_s),
        _not_negative(message.offload_token_s),
        _not_negative(message.upload_token_s),
    )


def _not_negative(seconds: float) -> float:
    """0 for a NaN too: a worker sorts by these."""
    return max(0.0, seconds)


def encode_report(report: Report) -> scheduler_pb2.Report:
    return scheduler_pb2.Report(
        seq=report.seq,
        applied_plan_seq=report.applied_plan_seq,
        progress=[_encode_progress(p) for p in report.progress],
        finished=[
            scheduler_pb2.FinishedRequest(
                request_id=f.request_id,
                output_tokens=f.output_tokens,
                reason=encode_reason(f.reason),
            )
            for f in report.finished
        ],
        evicted=[_encode_progress(p) for p in report.evicted],
        free_tokens=report.free_tokens,
        timings=[encode_timing(t) for t in report.timings],
        swaps=[encode_swap(s) for s in report.swaps],
    )


def decode_report(message: scheduler_pb2.Report) -> Report:
    return Report(
        seq=message.seq,
        applied_plan_seq=message.applied_plan_seq,
        progress=tuple(_decode_progress(p) for p in message.progress),
        finished=tuple(
            Completion(f.request_id, f.output_tokens, decode_reason(f.reason) or FinishReason.ERROR)
            for f in message.finished
        ),
        evicted=tuple(_decode_progress(p) for p in message.evicted),
        free_tokens=message.free_tokens,
        timings=tuple(decode_timing(t) for t in message.timings),
        swaps=decode_swaps(message.swaps),
    )


def _encode_progress(progress: Progress) -> scheduler_pb2.Progress:
    return scheduler_pb2.Progress(
        request_id=progress.request_id,
        output_tokens=progress.output_tokens,
        held_tokens=progress.held_tokens,
    )


def _decode_progress(message: scheduler_pb2.Progress) -> Progress:
    return Progress(message.request_id, message.output_tokens, message.held_tokens)


def decode_worker_hello(message: scheduler_pb2.WorkerHello) -> WorkerView:
    return WorkerView(
        worker_id=message.worker_id,
        address=message.address,
        model=message.model,
        kv_tokens=message.kv_tokens,
        block_tokens=message.block_tokens,
        max_running=message.max_running,
        max_context_tokens=message.max_context_tokens,
        kv_bytes_per_token=message.kv_bytes_per_token,
        host_tokens=message.host_tokens,
    )


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
    )


def decode_outcome(message: predictor_pb2.Outcome) -> Outcome:
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
    )
