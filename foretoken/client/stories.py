"""Fetches the decisions about a request from a server, over gRPC or HTTP."""

import http.client
from collections.abc import Sequence
from contextlib import closing
from typing import cast
from urllib.parse import quote

import grpc
from google.protobuf import json_format

from foretoken.client.address import GrpcAddress, HttpAddress, ServerAddress
from foretoken.client.errors import Unavailable, from_status
from foretoken.client.http import HttpServer
from protos.generated import gateway_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from services.runtime.network.channel import OPTIONS

TIMEOUT_S = 15.0


def fetch_stories(
    request_id: str, server: ServerAddress, api_key: str
) -> Sequence[scheduler_pb2.Story]:
    """Returns the story of each choice of the request. Raises ForetokenError."""
    match server:
        case HttpAddress():
            return _fetch_over_http(request_id, server, api_key).stories
        case GrpcAddress():
            return _fetch_over_grpc(request_id, server, api_key).stories


def _fetch_over_http(
    request_id: str, server: HttpAddress, api_key: str
) -> scheduler_pb2.WhyResponse:
    path = f"/ui/why/{quote(request_id, safe='')}"
    try:
        connection, answer = HttpServer(server, api_key).open("GET", path)
        with closing(connection):
            found = json_format.Parse(
                answer.read(), scheduler_pb2.WhyResponse(), ignore_unknown_fields=True
            )
    except (json_format.ParseError, OSError, http.client.HTTPException):
        found = scheduler_pb2.WhyResponse()
    if not found.stories:  # an unknown request is a 404
        raise Unavailable(
            f"{server} does not explain requests over HTTP; use its gRPC address, or start it "
            "without --no-ui"
        )
    return found


def _fetch_over_grpc(
    request_id: str, server: GrpcAddress, api_key: str
) -> scheduler_pb2.WhyResponse:
    """Asks the gateway that listens there, or the scheduler."""
    request = scheduler_pb2.WhyRequest(request_id=request_id)
    metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
    with grpc.insecure_channel(server.target, options=OPTIONS) as channel:
        try:
            return gateway_pb2_grpc.GatewayStub(channel).Why(
                request, timeout=TIMEOUT_S, metadata=metadata
            )
        except grpc.RpcError as error:
            failed = cast(grpc.Call, error)
        if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
            try:
                return scheduler_pb2_grpc.SchedulerStub(channel).Why(request, timeout=TIMEOUT_S)
            except grpc.RpcError as error:
                failed = cast(grpc.Call, error)
    raise from_status(failed, server.target)
