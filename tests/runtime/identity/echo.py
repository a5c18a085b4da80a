"""A server that has every method of the services, and calls of them."""

from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import grpc
from grpc import StatusCode, aio

import protos.generated
from services.runtime.network.authorisation import ALLOWED, OPERATORS, SERVICE
from services.runtime.network.identity import (
    AnyIdentity,
    Identity,
    Protection,
    Role,
    TlsConfig,
    open_identity,
)
from services.runtime.server import Mount, Server, listening

TELEMETRY = f"{SERVICE}Telemetry/Scrape"  # each server has its own
UNLISTED = "/foretoken.v1.Later/Method"
# These demand no identity: a gateway checks keys, and a proxy calls the picker.
OF_CLIENTS = {f"{SERVICE}Gateway", "/envoy.service.ext_proc.v3.ExternalProcessor"}
PROTOS = [
    import_module(f"protos.generated.{module.name}")
    for module in iter_modules(protos.generated.__path__)
    if module.name.endswith("_pb2")
]
DECLARED = {
    f"/{service.full_name}/{method.name}"
    for proto in PROTOS
    for service in proto.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if f"/{service.full_name}" not in OF_CLIENTS
}
METHODS: Mapping[str, Set[Role]] = {
    method: ALLOWED.get(method, OPERATORS) for method in {*DECLARED - {TELEMETRY}, UNLISTED}
}
STREAM = f"{SERVICE}Worker/Stream"
SUBMIT = f"{SERVICE}Scheduler/Submit"
READY = b"ready"


def settings(folder: Path, name: str, **more: str) -> TlsConfig:
    files = {"cert": f"{name}.pem", "key": f"{name}.key", "ca": "ca.pem"}
    paths = {key: str(folder / file) for key, file in files.items()}
    return TlsConfig.model_validate(paths | more)


def identity(folder: Path, name: str, **more: str) -> Identity:
    found = open_identity(settings(folder, name, **more))
    assert isinstance(found, Identity)
    return found


class Echo(grpc.GenericRpcHandler):
    """Answers each method with its request, and a stream with READY and each message."""

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method
        if method == STREAM:
            return grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(self._answer) if method in METHODS else None

    async def _answer(self, request: bytes, context: Any) -> bytes:
        return request

    async def _stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield READY
        async for message in messages:
            yield message


ECHO = Mount("echo", lambda echo, server: server.add_generic_rpc_handlers((echo,)), Echo())


@asynccontextmanager
async def echoing(identity: AnyIdentity, address: str = "127.0.0.1:0") -> AsyncIterator[Server]:
    async with listening([ECHO], address, protection=Protection(identity)) as server:
        yield server


async def call(channel: Any, method: str = SUBMIT, timeout_s: float | None = 10) -> StatusCode:
    """The status of a call, OK if it is answered."""
    try:
        if method == STREAM:
            stream = channel.stream_stream(method)(timeout=timeout_s)
            # A write to a stream that the server has ended would hide its status.
            assert await stream.read() == READY
            await stream.write(b"m")
            await stream.done_writing()
            assert [await stream.read(), await stream.read()] == [b"m", aio.EOF]
        else:
            assert await channel.unary_unary(method)(b"m", timeout=timeout_s) == b"m"
    except aio.AioRpcError as error:
        return error.code()
    return StatusCode.OK


async def refusal(channel: Any, method: str = SUBMIT) -> str:
    """The sentence by which a call is refused."""
    try:
        await channel.unary_unary(method)(b"m", timeout=10)
    except aio.AioRpcError as error:
        return error.details() or ""
    raise AssertionError(f"{method} is answered")
