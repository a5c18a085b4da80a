"""What a gRPC call says beside its message: how long it may take, its id and its key."""

from collections.abc import Mapping
from math import inf
from typing import Any, cast

from gateway.admission.caller import REQUEST_ID, introduce
from gateway.admission.keys import bearer
from gateway.requests.parser import check_timeout
from gateway.requests.sla import OTHER
from protos.generated import common_pb2
from services.runtime.errors import InvalidArgument

DEADLINE_MARGIN_S = 0.05  # of a gRPC deadline, so that the answer so far still arrives
TIMEOUT_KEY = "x-request-timeout-s"
AUTHORIZATION = "authorization"


def metadata_of(context: Any) -> Mapping[str, str]:
    """Of a call; of a name that comes twice, the last."""
    return {key: str(value) for key, value in context.invocation_metadata() or ()}


def key_of(metadata: Mapping[str, str]) -> str:
    """The API key; empty without one."""
    return bearer(metadata.get(AUTHORIZATION, ""))


async def greet(context: Any, metadata: Mapping[str, str], key_name: str) -> None:
    """This task serves the call from here on; its client is told its id before anything else."""
    calling = introduce(metadata.get(REQUEST_ID, ""), key_name)
    await context.send_initial_metadata(((REQUEST_ID, calling.request_id),))


def timeout_s(context: Any, metadata: Mapping[str, str]) -> float:
    """From the call's own deadline, and from metadata as over HTTP; infinite without either."""
    remaining_s = cast(float | None, context.time_remaining())
    limit_s = inf
    if remaining_s is not None:
        limit_s = max(0.0, remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 10))
    if TIMEOUT_KEY in metadata:
        limit_s = min(limit_s, parse_timeout(metadata[TIMEOUT_KEY]))
    return limit_s


def class_of(sla: common_pb2.Sla) -> str:
    """The class that a client names; with budgets of its own it is none of ours."""
    return OTHER if any(field.name != "name" for field, _ in sla.ListFields()) else sla.name


def parse_timeout(text: str) -> float:
    """The value of `x-request-timeout-s`; raises InvalidArgument."""
    try:
        timeout_s = float(text)
    except ValueError:
        raise InvalidArgument(TIMEOUT_KEY, f"must be seconds, not {text[:40]!r}") from None
    return check_timeout(TIMEOUT_KEY, timeout_s)
