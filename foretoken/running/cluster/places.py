"""Where the workers of `foretoken serve` run: on this machine, or on the nodes of a cluster."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from foretoken.running.children.processes import Launch, start
from services.runtime.config import ConfigError
from services.worker.config import WorkerConfig

WorkerSettings = Mapping[str, str]


@dataclass(frozen=True)
class Places:
    """How workers start, and what their places set: of each worker, and of the scheduler, which
    they must reach. The defaults are those of this machine."""

    launch: Launch = start
    workers: Sequence[WorkerSettings] = ()
    scheduler: dict[str, str] = field(default_factory=dict)


Reserve = Callable[[WorkerConfig, int], AbstractAsyncContextManager[Places]]


@asynccontextmanager
async def _here(worker: WorkerConfig, workers: int) -> AsyncIterator[Places]:
    yield Places()


def _on_ray(worker: WorkerConfig, workers: int) -> AbstractAsyncContextManager[Places]:
    try:
        from foretoken.running.cluster.ray_places import reserve
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "--cluster ray needs Ray, which is not installed: pip install 'foretoken[ray]'"
        ) from None
    return reserve(worker, workers)


# By `--cluster`: reserve places for so many workers with these settings, while the block runs.
CLUSTERS: Mapping[str, Reserve] = {"": _here, "ray": _on_ray}
