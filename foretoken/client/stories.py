"""Fetch the decisions about a request from a server, over gRPC or HTTP."""

import http.client
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from foretoken.client.address import GrpcAddress, HttpAddress, ServerAddress
from foretoken.client.errors import Unavailable, from_status
from foretoken.client.http import HttpServer

if TYPE_CHECKING:
    from protos.generated import scheduler_pb2

TIMEOUT_S = 15.0


@dataclass(frozen=True)
class StoryLine:
    """One decision; `at_s` counts from the arrival. A repeated line has `times` and `until_s`."""

    at_s: float
    text: str
    times: int = 1
    until_s: float = 0.0


@dataclass(frozen=True)
class RequestStory:
    """All decisions about one request, oldest first."""

    request_id: str
    live: bool
    lines: Sequence[StoryLine]


def fetch_stories(request_id: str, server: ServerAddress, api_key: str) -> list[RequestStory]:
    """Return the story of each choice of the request. Raises ForetokenError."""
    match server:
        case HttpAddress():
            return _fetch_over_http(request_id, server, api_key)
        case GrpcAddress():
            return _fetch_over_grpc(request_id, server, api_key)


def _fetch_over_http(request_id: str, server: HttpAddress, api_key: str) -> list[RequestStory]:
    try:
        connection, answer = HttpServer(server, api_key).open(
            "GET", f"/ui/why/{quote(request_id, safe='')}"
        )
        with closing(connection):
            stories = json.loads(answer.read())["stories"]
            return [
                RequestStory(
                    story["request_id"],
                    story["live"],
                    [
                        StoryLine(line["at_s"], line["text"], line["times"], line["until_s"])
                        for line in story["chapters"]
                    ],
                )
                for story in stories
            ]
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
        raise Unavailable(
            f"{server} does not explain requests over HTTP; use its gRPC address, or start it "
            "without --no-ui"
        ) from None


def _fetch_over_grpc(request_id: str, server: GrpcAddress, api_key: str) -> list[RequestStory]:
    return [
        RequestStory(
            story.request_id,
            story.live,
            [StoryLine(line.at_s, line.text, line.times, line.until_s) for line in story.chapters],
        )
        for story in _ask(request_id, server, api_key).stories
    ]


def _ask(request_id: str, server: GrpcAddress, api_key: str) -> "scheduler_pb2.WhyResponse":
    """Ask the gateway that listens there, or the scheduler."""
    import grpc

    from protos.generated import gateway_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
    from services.runtime.channel import OPTIONS

    request = scheduler_pb2.WhyRequest(request_id=request_id)
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    with grpc.insecure_channel(server.target, options=OPTIONS) as channel:
        try:
            return gateway_pb2_grpc.GatewayStub(channel).Why(
                request, timeout=TIMEOUT_S, metadata=metadata
            )
        except grpc.RpcError as error:
            failed = error
        if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
            try:
                return scheduler_pb2_grpc.SchedulerStub(channel).Why(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                failed = error
    raise from_status(failed.code(), failed.details(), (), server.target)
