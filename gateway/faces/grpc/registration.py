"""Registers the gateway's service so that unparsable requests reach the servicer."""

from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from protos.generated import gateway_pb2, gateway_pb2_grpc


class LenientRegistrar:
    """Replaces the request deserializer of `Generate` during registration. grpc reports a request
    that does not parse as an internal error; the servicer reports it as INVALID_ARGUMENT."""

    def __init__(self, server: Any):
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Does nothing: `add_registered_method_handlers` registers the changed handlers."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        lenient = handlers["Generate"]._replace(request_deserializer=_parse_or_none)
        handlers = {**handlers, "Generate": lenient}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, handlers),)
        )
        self._server.add_registered_method_handlers(service, handlers)


def add_to_server(servicer: Any, server: Any) -> None:
    gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, cast(Any, LenientRegistrar(server)))


def _parse_or_none(data: bytes) -> gateway_pb2.GenerateRequest | None:
    try:
        return gateway_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        return None
