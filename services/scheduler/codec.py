"""Converts between the scheduler's messages and its events and actions."""

from math import inf, isfinite

from protos.generated import batcher_pb2, common_pb2, predictor_pb2, scheduler_pb2
from services.core import RejectReason, Request
from services.policies.snapshot import CHAIN
from services.runtime.codecs.arrange import decode_floats
from services.runtime.codecs.common import decode_sla, encode_forecast, encode_reason
from services.runtime.prefix import decode_hashes
from services.scheduler.core import events as ev
from services.scheduler.core.jobs import Fleet
from services.scheduler.observe.story import Story

MAX_NAME_CHARS = 256  # of a tenant and an API key

_REJECT_TO_PROTO: dict[RejectReason, scheduler_pb2.RejectReason.ValueType] = {
    RejectReason.QUEUE_FULL: scheduler_pb2.REJECT_REASON_QUEUE_FULL,
    RejectReason.TOO_LONG: scheduler_pb2.REJECT_REASON_TOO_LONG,
    RejectReason.DUPLICATE: scheduler_pb2.REJECT_REASON_DUPLICATE,
    RejectReason.NO_MODEL: scheduler_pb2.REJECT_REASON_NO_MODEL,
    RejectReason.TOO_LATE: scheduler_pb2.REJECT_REASON_TOO_LATE,
}


def decode_request(message: scheduler_pb2.NewRequest, now: float) -> Request:
    """Ages and remaining times become readings of the scheduler's clock."""
    arrival = now - _seconds(message.age_s)
    deadline = now + _seconds(message.deadline_in_s) if message.HasField("deadline_in_s") else inf
    return Request(
        request_id=message.request_id,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        arrival_s=arrival,
        application=message.application,
        delivered_tokens=message.delivered_tokens,
        deadline_s=deadline,
        sla=decode_sla(message.sla),
        worker_id=message.worker_id,
        prefix_hashes=decode_hashes(message.prefix_hashes, CHAIN),
        tenant=message.tenant[:MAX_NAME_CHARS],
        include_forecast=message.include_forecast,
        priority=message.priority,
        min_tokens=min(message.min_tokens, message.max_tokens),
        key_name=message.key_name[:MAX_NAME_CHARS],
        adapter=message.adapter,
        weight=message.weight,
        length_quantile=message.length_quantile,
    )


def _seconds(given: float) -> float:
    """0 for a negative time, and for one that is no finite number."""
    return given if isfinite(given) and given > 0 else 0.0


def encode_forecast_input(
    request: Request, text: common_pb2.PromptText | None, traceparent: str = ""
) -> predictor_pb2.ForecastInput:
    return predictor_pb2.ForecastInput(
        request_id=request.request_id,
        model=request.model,
        application=request.application,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.max_tokens,
        text=text,
        traceparent=traceparent,
    )


def decode_arrangement(message: batcher_pb2.Arrangement) -> ev.Arranged:
    workers = tuple(
        ev.WorkerDecisionRow(
            decision.worker,
            tuple(decision.run),
            tuple(decision.limits),
            tuple(decision.pause),
            tuple(decision.victims),
            decision.peak_tokens,
            decision.lockstep,
        )
        for decision in message.workers
    )
    given = message.explanations
    columns = given.rows, given.reasons, given.first_values, given.second_values
    explanations = tuple(ev.WaitExplanationRow(*each) for each in zip(*columns, strict=False))
    return ev.Arranged(
        message.round,
        workers,
        message.next_s,
        message.not_before_s,
        explanations,
        dict(message.numbers),
        {name: decode_floats(data, name) for name, data in message.notes.items()},
    )


def encode_request_event(action: ev.GatewayMessage) -> scheduler_pb2.SchedulerEvent:
    name = action.request_id
    match action:
        case ev.Place():
            placed = scheduler_pb2.Placed(
                worker_id=action.worker_id,
                worker_address=action.address,
                queued_s=action.queued_s,
            )
            event = scheduler_pb2.RequestEvent(request_id=name, placed=placed)
        case ev.Preempt():
            preempted = scheduler_pb2.Preempted(output_tokens=action.output_tokens)
            event = scheduler_pb2.RequestEvent(request_id=name, preempted=preempted)
        case ev.Resume():
            resumed = scheduler_pb2.Resumed(held_tokens=action.held_tokens)
            event = scheduler_pb2.RequestEvent(request_id=name, resumed=resumed)
        case ev.SendForecast():
            update = scheduler_pb2.ForecastUpdate(
                forecast=encode_forecast(action.forecast),
                token_s=action.token_s,
                ttft_s=action.ttft_s,
            )
            event = scheduler_pb2.RequestEvent(request_id=name, forecast_update=update)
        case ev.SendLengthBound():
            bound = scheduler_pb2.LengthBound(output_tokens=action.output_tokens)
            event = scheduler_pb2.RequestEvent(request_id=name, length_bound=bound)
        case ev.Finish():
            finished = scheduler_pb2.Finished(
                reason=encode_reason(action.reason),
                output_tokens=action.output_tokens,
                preemptions=action.preemptions,
                queued_s=action.queued_s,
                message=action.message,
            )
            event = scheduler_pb2.RequestEvent(request_id=name, finished=finished)
        case ev.Refuse():
            rejected = scheduler_pb2.Rejected(
                reason=_REJECT_TO_PROTO[action.reject.reason],
                message=action.reject.message,
                retry_after_s=action.reject.retry_after_s,
            )
            event = scheduler_pb2.RequestEvent(request_id=name, rejected=rejected)
    return scheduler_pb2.SchedulerEvent(request=event)


def encode_story(story: Story) -> scheduler_pb2.Story:
    return scheduler_pb2.Story(
        request_id=story.request_id,
        live=story.live,
        chapters=[
            scheduler_pb2.Chapter(
                at_s=line.at_s,
                kind=line.kind,
                text=line.text,
                times=line.times,
                until_s=line.until_s,
            )
            for line in story.lines
        ],
    )


def encode_fleet(fleet: Fleet) -> scheduler_pb2.FleetView:
    return scheduler_pb2.FleetView(
        workers=[
            scheduler_pb2.WorkerInfo(
                worker_id=status.view.worker_id,
                address=status.view.address,
                model=status.view.model,
                kv_tokens=status.view.kv_tokens,
                max_context_tokens=status.view.max_context_tokens,
                running=status.running,
                held_tokens=status.held_tokens,
                block_tokens=status.view.block_tokens,
                start=status.view.start,
                placement=status.view.placement,
                epoch=status.view.epoch,
            )
            for status in fleet.workers
        ],
        queued=fleet.queued,
        policy=fleet.policy,
        drain_s=fleet.drain_s,
        prefix_blocks=fleet.prefix_blocks,
    )
