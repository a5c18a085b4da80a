"""`python -m services.runtime.healthcheck ADDRESS`: exits with 0 if the server is serving."""

import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 4.0


def check(address: str) -> str:
    """The server's status: SERVING, NOT_SERVING, or the error of the call."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


if __name__ == "__main__":
    status = check(sys.argv[1])
    print(status)
    sys.exit(status != "SERVING")
