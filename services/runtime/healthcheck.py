"""`python -m services.runtime.healthcheck ADDRESS`: exits with 0 if the server is serving."""

import sys

import grpc
from grpc_health.v1 import health_pb2

TIMEOUT_S = 4.0


def check(address: str) -> str:
    """The server's status: SERVING, NOT_SERVING, or why it cannot be queried."""
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = ask(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


if __name__ == "__main__":
    said = check(sys.argv[1])
    print(said)
    sys.exit(said != "SERVING")
