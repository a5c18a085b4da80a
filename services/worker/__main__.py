"""`python -m services.worker`: config → objects → serve."""

from prometheus_client import CollectorRegistry

from services.runtime.main import Unit, run_service
from services.runtime.startup import Laps, importing
from services.worker.config import WorkerConfig


def build(config: WorkerConfig, registry: CollectorRegistry) -> Unit:
    """Load and profile the model, then serve it. Raises ValueError when it can't be served.

    PyTorch and transformers are imported here, once the config was found good.
    """
    laps = Laps()
    with importing():
        from services.worker.machine import keep_what_numba_compiles

        keep_what_numba_compiles()
        from services.worker.serving import assemble
    laps.lap("imports")
    return assemble(config, registry, laps)


if __name__ == "__main__":
    run_service(WorkerConfig, build)
