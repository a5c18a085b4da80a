"""Metadata of a gRPC call: timeout, request id and API key."""

from collections.abc import Mapping
from math import inf
from typing import Any, cast

from gateway.admission.caller import REQUEST_ID, bind_caller
from gateway.requests.timeout import TIMEOUT_KEY, parse_timeout
from gateway.types.api_keys import parse_bearer

DEADLINE_MARGIN_S = 0.05  # before a gRPC deadline, so that the answer so far still arrives
FINGERPRINT = "system-fingerprint"
AUTHORIZATION = "authorization"


def read_metadata(context: Any) -> Mapping[str, str]:
    """The call's metadata; of a repeated name, the last value."""
    return {key: str(value) for key, value in context.invocation_metadata() or ()}


def read_key(metadata: Mapping[str, str]) -> str:
    """The API key, or an empty string."""
    return parse_bearer(metadata.get(AUTHORIZATION, ""))


async def set_caller(
    context: Any, metadata: Mapping[str, str], key_name: str, fingerprint: str = ""
) -> None:
    """Sets the caller of the present task and sends initial metadata: the request id, and the
    fingerprint of the system if it has one."""
    caller = bind_caller(metadata.get(REQUEST_ID, ""), key_name)
    mark = ((FINGERPRINT, fingerprint),) if fingerprint else ()
    await context.send_initial_metadata(((REQUEST_ID, caller.request_id), *mark))


def read_timeout(context: Any, metadata: Mapping[str, str]) -> float:
    """Seconds: the shorter of the gRPC deadline and the timeout in the metadata; infinite without
    both. Raises InvalidArgument."""
    remaining_s = cast(float | None, context.time_remaining())
    limit_s = inf
    if remaining_s is not None:
        limit_s = max(0.0, remaining_s - min(DEADLINE_MARGIN_S, remaining_s / 10))
    if TIMEOUT_KEY in metadata:
        limit_s = min(limit_s, parse_timeout(metadata[TIMEOUT_KEY]))
    return limit_s
