"""Logs and metrics, set up once a process by its `__main__`."""

import logging
import sys

from prometheus_client import CollectorRegistry, start_http_server

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80,
)  # fmt: skip


def setup_logging(service: str, level: str = "INFO") -> None:
    """One line a record on stderr, the service's name in front."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)


def serve_metrics(registry: CollectorRegistry, port: int) -> None:
    """Expose `/metrics` of a service that has no HTTP of its own; port 0 turns it off."""
    if port:
        start_http_server(port, registry=registry)
