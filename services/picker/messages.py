"""Envoy's messages: what the picker reads of them, and its answers. Pure."""

import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus

from protos.generated import ext_proc_pb2 as pb
from services.picker.core.picking import Cause, Refusal

ENDPOINT = "x-gateway-destination-endpoint"  # header, and key of the metadata
SERVED = f"{ENDPOINT}-served"
METADATA = "envoy.lb"
SUBSET_METADATA, SUBSET = "envoy.lb.subset_hint", f"{ENDPOINT}-subset"
ATTRIBUTES, UPSTREAM = "envoy.filters.http.ext_proc", "upstream.address"
# Of one message: Envoy accepts 64 KiB of a stream before it has read the last bytes.
MAX_CHUNK_BYTES = 62_000
MAX_SUBSET = 4_096

STATUS: Mapping[Cause, HTTPStatus] = {
    Cause.NO_ENDPOINT: HTTPStatus.SERVICE_UNAVAILABLE,
    Cause.SHED: HTTPStatus.TOO_MANY_REQUESTS,
    Cause.FULL: HTTPStatus.TOO_MANY_REQUESTS,
    Cause.TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    Cause.BAD_HEADER: HTTPStatus.BAD_REQUEST,
}


def header_value(header: pb.HeaderValue) -> str:
    return header.value or header.raw_value.decode("latin-1")


def read_headers(headers: pb.HeaderMap, names: frozenset[str]) -> dict[str, str]:
    """The headers of these names; the last of duplicates."""
    return {each.key: header_value(each) for each in headers.headers if each.key in names}


def read_subset(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that a hint allows; None without a hint."""
    hint = message.metadata_context.filter_metadata.get(SUBSET_METADATA)
    value = hint.fields.get(SUBSET) if hint is not None else None
    if value is None:
        return None
    listed = [each.string_value for each in value.list_value.values[:MAX_SUBSET]]
    named = listed or value.string_value.split(",")[:MAX_SUBSET]
    return frozenset(each.strip() for each in named if each.strip())


def read_served_by(message: pb.ProcessingRequest) -> str:
    """The endpoint that has served, as the proxy states it; empty if it does not."""
    metadata = message.metadata_context.filter_metadata.get(METADATA)
    if metadata is not None and SERVED in metadata.fields:
        return metadata.fields[SERVED].string_value
    attributes = message.attributes.get(ATTRIBUTES)
    if attributes is not None and UPSTREAM in attributes.fields:
        return attributes.fields[UPSTREAM].string_value
    return ""


def destination_headers(addresses: tuple[str, ...]) -> pb.ProcessingResponse:
    """The answer to request headers: the endpoints as a header and as metadata."""
    listed = ",".join(addresses)
    answer = pb.ProcessingResponse()
    common = answer.request_headers.response
    common.header_mutation.set_headers.append(_header(ENDPOINT, listed))
    common.clear_route_cache = True
    metadata = answer.dynamic_metadata.fields[METADATA].struct_value
    metadata.fields[ENDPOINT].string_value = listed
    return answer


def request_body(body: bytes, end_of_stream: bool) -> Iterator[pb.ProcessingResponse]:
    """A whole body, unchanged, in chunks that Envoy accepts; the last one ends the stream, unless
    trailers follow."""
    for at in range(0, max(1, len(body)), MAX_CHUNK_BYTES):
        last = at + MAX_CHUNK_BYTES >= len(body)
        answer = pb.ProcessingResponse()
        _return(answer.request_body, body[at : at + MAX_CHUNK_BYTES], last and end_of_stream)
        yield answer


def response_body(body: pb.HttpBody, streamed: bool) -> pb.ProcessingResponse:
    """Returns a chunk of an answer unchanged; `streamed`: the proxy has not kept it."""
    answer = pb.ProcessingResponse()
    if streamed:
        _return(answer.response_body, body.body, body.end_of_stream)
    else:
        answer.response_body.SetInParent()
    return answer


def _return(answer: pb.BodyResponse, chunk: bytes, end_of_stream: bool) -> None:
    """Sets the fields one by one, for every event of every answer: constructors of nested messages
    take three times as long."""
    part = answer.response.body_mutation.streamed_response
    part.SetInParent()  # it may be empty
    part.body, part.end_of_stream = chunk, end_of_stream


def refuse(refusal: Refusal) -> pb.ProcessingResponse:
    """An answer to the client instead of the request, in OpenAI's format of errors."""
    status = STATUS[refusal.cause]
    error = {"message": refusal.message, "type": refusal.cause.value, "code": status.value}
    headers = [_header("content-type", "application/json")]
    if refusal.retry_after_s:
        headers.append(_header("retry-after", f"{refusal.retry_after_s:.0f}"))
    immediate = pb.ImmediateResponse(
        status=pb.HttpStatus(code=status.value),
        headers=pb.HeaderMutation(set_headers=headers),
        body=json.dumps({"error": error}).encode(),
        details=f"foretoken_{refusal.cause.value}",
    )
    return pb.ProcessingResponse(immediate_response=immediate)


def _header(key: str, value: str) -> pb.HeaderValueOption:
    return pb.HeaderValueOption(
        header=pb.HeaderValue(key=key, raw_value=value.encode("latin-1", "replace")),
        append_action=pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )
