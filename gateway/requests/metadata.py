"""Metadata of a gRPC call: timeout, request id and API key."""

from collections.abc import Mapping
from math import inf
from typing import Any, cast

from gateway.admission.caller import REQUEST_ID, introduce
from gateway.admission.keys import bearer
from gateway.requests.parser import check_timeout
from gateway.requests.sla import OTHER
from protos.generated import common_pb2
from services.runtime.errors import InvalidArgument

DEADLINE_MARGIN_S = 0.05  # before a gRPC deadline, so that the answer so far still arrives
TIMEOUT_KEY = "x-request-timeout-s"
AUTHORIZATION = "authorization"


def metadata_of(context: Any) -> Mapping[str, str]:
    """The call's metadata; of a repeated name, the last value."""
    return {key: str(value) for key, value in context.invocation_metadata() or ()}


def key_of(metadata: Mapping[str, str]) -> str:
    """The API key, or an empty string."""
    return bearer(metadata.get(AUTHORIZATION, ""))


async def greet(context: Any, metadata: Mapping[str, str], key_name: str) -> None:
    """Sets the caller of the present task and sends the request id as initial metadata."""
    calling = introduce(metadata.get(REQUEST_ID, ""), key_name)
    await context.send_initial_metadata(((REQUEST_ID, calling.request_id),))


def timeout_s(context: Any, metadata: Mapping[str, str]) -> float:
    """The shorter of the gRPC deadline and the timeout in the metadata; infinite without both."""
    remaining_s = cast(float | None, context.time_remaining())
    limit_s = inf
    if remaining_s is not None:
        limit_s = max(0.0, remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 10))
    if TIMEOUT_KEY in metadata:
        limit_s = min(limit_s, parse_timeout(metadata[TIMEOUT_KEY]))
    return limit_s


def class_of(sla: common_pb2.Sla) -> str:
    """The class name in a request; OTHER for one with explicit budgets."""
    return OTHER if any(field.name != "name" for field, _ in sla.ListFields()) else sla.name


def parse_timeout(text: str) -> float:
    """The value of `x-request-timeout-s`. Raises InvalidArgument."""
    try:
        timeout_s = float(text)
    except ValueError:
        raise InvalidArgument(TIMEOUT_KEY, f"must be seconds, not {text[:40]!r}") from None
    return check_timeout(TIMEOUT_KEY, timeout_s)
