"""`foretoken epp`: the endpoint picker for the Gateway API Inference Extension."""

import json
from typing import Annotated

from foretoken.commands.options import option_maker
from foretoken.commands.usage import check_log_level

endpoint_option = option_maker("Endpoints")
process_option = option_maker("Process and settings")


def epp(
    endpoint: Annotated[
        list[str] | None,
        endpoint_option("A model server; repeatable.", "IP:PORT", "none"),
    ] = None,
    endpoints_file: Annotated[
        str,
        endpoint_option(
            "TOML or JSON with a list `endpoints`, read again when it changes.", "FILE", "none"
        ),
    ] = "",
    dns: Annotated[
        str,
        endpoint_option(
            "Name with one address per model server, resolved again every 2 s.", "HOST:PORT", "none"
        ),
    ] = "",
    pool: Annotated[
        str,
        endpoint_option(
            "An InferencePool of Kubernetes: its ready pods, and its objectives.",
            "NAMESPACE/NAME",
            "none",
        ),
    ] = "",
    kube_api: Annotated[
        str,
        endpoint_option(
            "Kubernetes' API for --pool, such as that of `kubectl proxy`.", "URL", "the pod's own"
        ),
    ] = "",
    address: Annotated[
        str, process_option("Address for the proxy, gRPC.", "HOST:PORT", "127.0.0.1:9002")
    ] = "",
    predictor: Annotated[
        str,
        process_option(
            "A predictor service for forecasts by prompt.", "HOST:PORT", "lengths of recent answers"
        ),
    ] = "",
    metrics_port: Annotated[
        int, process_option("Port of HTTP /metrics; 0: none.", "PORT", min=0, max=65_535)
    ] = 0,
    log_level: Annotated[
        str, process_option("debug, info, warning or error.", "LEVEL", "info")
    ] = "",
    sets: Annotated[
        list[str] | None,
        process_option(
            "Any setting; repeatable; overrides the other options.",
            "picker.KEY=VALUE",
            "none",
            names=["--set"],
        ),
    ] = None,
) -> None:
    """Pick a model server for each request of an Envoy proxy, by forecast."""
    check_log_level(log_level)
    from services.picker.__main__ import build
    from services.picker.config import PickerConfig
    from services.runtime.main import run_service

    options = {
        "endpoints": json.dumps(endpoint) if endpoint else "",
        "endpoints_file": endpoints_file,
        "dns": dns,
        "pool": pool,
        "kube_api": kube_api,
        "address": address,
        "predictor_address": predictor,
        "metrics_port": str(metrics_port or ""),
        "log_level": log_level.upper(),
    }
    given = [f"{PickerConfig.section}.{key}={value}" for key, value in options.items() if value]
    run_service(PickerConfig, build, [*given, *(sets or [])])
