"""`python -m services.picker`: config → objects → serve."""

import logging

from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from protos.generated import ext_proc_pb2_grpc
from services.picker.config import PickerConfig
from services.picker.service import PickerService
from services.runtime.main import Unit, run_service
from services.runtime.network.connector import Connector
from services.runtime.server import Mount

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


def build(
    config: PickerConfig, registry: CollectorRegistry, _: Tracing, connector: Connector
) -> Unit:
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else a line for each request
    service = PickerService(config, registry, connector)
    mount = Mount(
        SERVICE,
        ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server,
        service,
        on_invalid=service.metrics.invalid.count,
    )
    return Unit([mount], service.run, service.drain, cycle_free=True, ready=service.ready)


if __name__ == "__main__":
    run_service(PickerConfig, build)
