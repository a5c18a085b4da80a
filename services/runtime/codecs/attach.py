"""Messages between the scheduler and its workers: hello, plans, reports.

Decoding accepts bad values: unknown enum values become a safe default, and negative or NaN times
become 0.
"""

from collections.abc import Sequence, Sized
from dataclasses import asdict, fields
from math import isfinite

from protos.generated import scheduler_pb2
from services.core import (
    Completion,
    FinishReason,
    Grant,
    HeldRequest,
    Pause,
    Plan,
    QueueOrder,
    Report,
    RequestProgress,
    Residency,
    StaticBatch,
    WorkerView,
)
from services.costs import KVCosts
from services.runtime.codecs.common import (
    decode_reason,
    decode_swaps,
    decode_timing,
    decode_tokens_per_step,
    encode_reason,
    encode_swap,
    encode_timing,
)
from services.runtime.errors import InvalidArgument
from services.runtime.prefix import MAX_PREFIX_CHANGES, decode_hashes, encode_hashes

_RESIDENCY_TO_PROTO = {
    value: scheduler_pb2.Residency.Value(f"RESIDENCY_{value.name}") for value in Residency
}
_RESIDENCY_FROM_PROTO = {value: key for key, value in _RESIDENCY_TO_PROTO.items()}
START_CHARS = 300  # kept of `start` and of `placement`


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
        start=message.start[:START_CHARS],
        placement=message.placement[:START_CHARS],
        max_batch_tokens=message.max_batch_tokens,
        report_every_steps=message.report_every_steps,
        adapter_slots=message.adapter_slots,
        adapter_turn_steps=message.adapter_turn_steps,
        epoch=message.epoch,
    )


def decode_held(message: scheduler_pb2.WorkerHello) -> tuple[HeldRequest, ...]:
    """The requests that the worker already holds when its stream opens."""
    names = [field.name for field in fields(HeldRequest)]
    return tuple(HeldRequest(*(getattr(held, name) for name in names)) for held in message.held)


def decode_drain_s(message: scheduler_pb2.WorkerDraining) -> float:
    """For how long a draining worker continues; 0 if invalid."""
    return message.drain_s if isfinite(message.drain_s) and message.drain_s > 0 else 0.0


def encode_held(held: HeldRequest) -> scheduler_pb2.HeldRequest:
    return scheduler_pb2.HeldRequest(**asdict(held))


def encode_plan(plan: Plan) -> scheduler_pb2.Plan:
    """Columns, because a message for each request would cost more than all that is done with it."""
    return scheduler_pb2.Plan(
        seq=plan.seq,
        admit=_encode_grants(plan.admit),
        extend=_encode_grants(plan.extend),
        pause=scheduler_pb2.PauseColumns(
            request_ids=[pause.request_id for pause in plan.pause],
            residencies=[_RESIDENCY_TO_PROTO[pause.residency] for pause in plan.pause],
        ),
        order=scheduler_pb2.QueueOrder(
            request_ids=plan.order.request_ids, wait_s=plan.order.wait_s
        ),
        prefetch=plan.prefetch,
        cancel=plan.cancel,
        victims=plan.victims,
        residency=plan.residency,
        costs=_encode_costs(plan.costs),
        batches=[
            scheduler_pb2.StaticBatch(number=b.number, members=b.members) for b in plan.batches
        ],
        prefix_blocks=plan.prefix_blocks,
    )


def decode_plan(message: scheduler_pb2.Plan) -> Plan:
    """Raises InvalidArgument if columns have different lengths."""
    return Plan(
        seq=message.seq,
        admit=_decode_grants(message.admit, "admit"),
        extend=_decode_grants(message.extend, "extend"),
        pause=_decode_pauses(message.pause),
        prefetch=tuple(message.prefetch),
        cancel=tuple(message.cancel),
        victims=tuple(message.victims),
        order=_decode_order(message.order),
        residency=message.residency,
        costs=_decode_costs(message.costs),
        batches=tuple(StaticBatch(b.number, tuple(b.members)) for b in message.batches),
        prefix_blocks=message.prefix_blocks,
    )


def _encode_grants(grants: Sequence[Grant]) -> scheduler_pb2.GrantColumns:
    names, limits = zip(*grants, strict=True) if grants else ((), ())
    return scheduler_pb2.GrantColumns(request_ids=names, limit_tokens=limits)


def _decode_grants(message: scheduler_pb2.GrantColumns, name: str) -> tuple[Grant, ...]:
    _require_equal(name, message.request_ids, message.limit_tokens)
    return tuple(map(Grant, message.request_ids, message.limit_tokens))


def _decode_pauses(message: scheduler_pb2.PauseColumns) -> tuple[Pause, ...]:
    _require_equal("pause", message.request_ids, message.residencies)
    residencies = (_RESIDENCY_FROM_PROTO.get(r, Residency.KEEP) for r in message.residencies)
    return tuple(map(Pause, message.request_ids, residencies))


def _decode_order(message: scheduler_pb2.QueueOrder) -> QueueOrder:
    _require_equal("order", message.request_ids, message.wait_s)
    return QueueOrder(tuple(message.request_ids), tuple(map(_not_negative, message.wait_s)))


def _require_equal(name: str, *columns: Sized) -> None:
    """Raises InvalidArgument if the columns of the field `name` have different lengths."""
    if len(set(map(len, columns))) > 1:
        raise InvalidArgument(name, "has columns of different lengths")


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
    """0 for negative numbers and NaN, which workers could not sort by."""
    return max(0.0, seconds)


def encode_report(report: Report) -> scheduler_pb2.Report:
    return scheduler_pb2.Report(
        seq=report.seq,
        applied_plan_seq=report.applied_plan_seq,
        progress=_encode_columns(report.progress),
        finished=[
            scheduler_pb2.FinishedRequest(
                request_id=f.request_id,
                output_tokens=f.output_tokens,
                reason=encode_reason(f.reason),
            )
            for f in report.finished
        ],
        evicted=[_encode_progress(p) for p in report.evicted],
        timings=[encode_timing(t) for t in report.timings],
        swaps=[encode_swap(s) for s in report.swaps],
        free_blocks=report.free_blocks,
        shared_blocks=report.shared_blocks,
        prefixes_added=encode_hashes(report.prefixes_added),
        prefixes_gone=encode_hashes(report.prefixes_gone),
        tokens_per_step=report.tokens_per_step,
        max_running=report.max_running,
    )


def decode_report(message: scheduler_pb2.Report) -> Report:
    """Raises InvalidArgument if columns have different lengths."""
    return Report(
        seq=message.seq,
        applied_plan_seq=message.applied_plan_seq,
        progress=_decode_columns(message.progress),
        finished=tuple(
            Completion(f.request_id, f.output_tokens, decode_reason(f.reason) or FinishReason.ERROR)
            for f in message.finished
        ),
        evicted=tuple(_decode_progress(p) for p in message.evicted),
        timings=tuple(decode_timing(t) for t in message.timings),
        swaps=decode_swaps(message.swaps),
        free_blocks=message.free_blocks,
        shared_blocks=message.shared_blocks,
        prefixes_added=decode_hashes(message.prefixes_added, MAX_PREFIX_CHANGES),
        prefixes_gone=decode_hashes(message.prefixes_gone, MAX_PREFIX_CHANGES),
        tokens_per_step=decode_tokens_per_step(message.tokens_per_step),
        max_running=message.max_running,
    )


def _encode_columns(progress: Sequence[RequestProgress]) -> scheduler_pb2.ProgressColumns:
    names, output, held, blocks = zip(*progress, strict=True) if progress else ((), (), (), ())
    return scheduler_pb2.ProgressColumns(
        request_ids=names, output_tokens=output, held_tokens=held, blocks=blocks
    )


def _decode_columns(message: scheduler_pb2.ProgressColumns) -> tuple[RequestProgress, ...]:
    columns = message.request_ids, message.output_tokens, message.held_tokens, message.blocks
    _require_equal("progress", *columns)
    return tuple(map(RequestProgress, *columns))


def _encode_progress(progress: RequestProgress) -> scheduler_pb2.Progress:
    return scheduler_pb2.Progress(
        request_id=progress.request_id,
        output_tokens=progress.output_tokens,
        held_tokens=progress.held_tokens,
        blocks=progress.blocks,
    )


def _decode_progress(message: scheduler_pb2.Progress) -> RequestProgress:
    return RequestProgress(
        message.request_id, message.output_tokens, message.held_tokens, message.blocks
    )
