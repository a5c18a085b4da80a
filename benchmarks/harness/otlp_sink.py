"""`python -m benchmarks.harness.otlp_sink`: a collector that drops what it receives. It prints its
address and ends by a signal."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc


class Traces(trace_grpc.TraceServiceServicer):
    def Export(
        self, request: trace_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_pb2.ExportTraceServiceResponse:
        return trace_pb2.ExportTraceServiceResponse()


class Metrics(metrics_grpc.MetricsServiceServicer):
    def Export(
        self, request: metrics_pb2.ExportMetricsServiceRequest, context: Any
    ) -> metrics_pb2.ExportMetricsServiceResponse:
        return metrics_pb2.ExportMetricsServiceResponse()


def main() -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    trace_grpc.add_TraceServiceServicer_to_server(Traces(), server)  # type: ignore[no-untyped-call]  # generated without types
    metrics_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)  # type: ignore[no-untyped-call]  # generated without types
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
