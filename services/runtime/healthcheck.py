"""`python -m services.runtime.healthcheck ADDRESS [plain]`: exits with 0 if the server serves.

With `FORETOKEN_TLS_CERT`, `_KEY` and `_CA` the call is over TLS, unless `plain` follows: the port
of a gateway is for clients.
"""

import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.runtime.config import ConfigError, load
from services.runtime.network.identity import (
    NO_TLS,
    Identity,
    TlsConfig,
    channel_credentials,
    dns_name,
    open_identity,
)

TIMEOUT_S = 4.0
PLAIN = "plain"


def check(address: str, tls: TlsConfig = NO_TLS) -> str:
    """The server's status: SERVING, NOT_SERVING, or the error of the call. Raises ConfigError."""
    with _connect(address, tls) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


def _connect(address: str, tls: TlsConfig) -> grpc.Channel:
    identity = None if address.startswith("unix:") else open_identity(tls)
    if not isinstance(identity, Identity):  # health needs no token
        return grpc.insecure_channel(address)
    options = [("grpc.ssl_target_name_override", dns_name(None))]
    return grpc.secure_channel(address, channel_credentials(identity.material()), options)


def main(arguments: list[str]) -> str:
    match arguments:
        case [address]:
            return check(address, load(TlsConfig))
        case [address, word] if word == PLAIN:
            return check(address)
        case _:
            return "usage: python -m services.runtime.healthcheck ADDRESS [plain]"


if __name__ == "__main__":
    try:
        status = main(sys.argv[1:])
    except ConfigError as error:
        status = str(error)
    print(status)
    sys.exit(status != "SERVING")
