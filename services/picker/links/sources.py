"""Where endpoints come from: settings, a file that may change, DNS, and Kubernetes."""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from services.picker.config import PickerConfig
from services.picker.core.endpoints import EndpointsError, parse_endpoints
from services.picker.links.kube.access import KubeAccess
from services.picker.links.kube.pool import InferencePoolSource
from services.runtime.config import ConfigError
from services.runtime.network.channel import host_port
from services.runtime.network.delivery import describe

log = logging.getLogger(__name__)


class EndpointSources:
    """The endpoints of all sources. A source that fails later keeps what it gave before; the loss
    and the return are logged once each."""

    def __init__(self, config: PickerConfig, apply: Callable[[Sequence[str]], None]):
        """`apply` gets all endpoints whenever they may have changed. Raises ConfigError without
        a source, and for a file that cannot be used."""
        if not (config.endpoints or config.endpoints_file or config.dns or config.pool):
            raise ConfigError(
                "no endpoints: give --endpoint, --endpoints-file, --dns or --pool "
                "(picker.endpoints, picker.endpoints_file, picker.dns, picker.pool)"
            )
        self._config = config
        self._apply = apply
        self._seen: tuple[int, int] = (0, 0)
        self._from_file: tuple[str, ...] = ()
        self._from_dns: tuple[str, ...] = ()
        self._kube = _open_pool(config, self._publish) if config.pool else None
        self._problems: dict[str, str] = {}
        if config.endpoints_file:
            try:
                self._read_file()
            except (OSError, EndpointsError) as error:
                raise ConfigError(
                    f"picker.endpoints_file: {config.endpoints_file}: {describe(error)}"
                ) from None
        self._publish()

    def priority(self, objective: str) -> int:
        """The priority of an objective by its name: the pool's, else that of the settings, else
        0."""
        named = self._kube.objectives if self._kube is not None else {}
        return named.get(objective, self._config.objectives.get(objective, 0))

    async def run(self) -> None:
        """Follows all sources until cancelled; a slow one does not delay the others."""
        async with asyncio.TaskGroup() as tasks:
            if self._kube is not None:
                tasks.create_task(self._kube.run())
            if self._config.endpoints_file:
                tasks.create_task(self._repeat("file", self._look_at_file))
            if self._config.dns:
                tasks.create_task(self._repeat("dns", self._resolve))

    async def _repeat(self, source: str, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await look()
                self._report(source, "", "read again")
            # A name that IDNA cannot encode gives a UnicodeError.
            except (OSError, UnicodeError, EndpointsError) as error:
                self._report(source, f"{describe(error)}; the earlier ones stay")
            self._publish()
            await asyncio.sleep(self._config.source_interval_s)

    async def _look_at_file(self) -> None:
        self._read_file()

    def _read_file(self) -> None:
        """A few lines, read on the event loop only when they changed."""
        path = Path(self._config.endpoints_file)
        status = path.stat()
        seen = (status.st_mtime_ns, status.st_size)
        if seen != self._seen:
            self._from_file = parse_endpoints(path.read_text(errors="replace"), path.suffix)
            self._seen = seen

    async def _resolve(self) -> None:
        host, _, port = self._config.dns.rpartition(":")
        found = await asyncio.get_running_loop().getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM
        )
        self._from_dns = tuple(sorted({host_port(str(each[4][0]), port) for each in found}))

    def _publish(self) -> None:
        from_pool = self._kube.endpoints if self._kube is not None else ()
        listed = (*self._config.endpoints, *self._from_file, *self._from_dns, *from_pool)
        every = dict.fromkeys(listed)
        most = self._config.max_endpoints
        cut = f"{len(every)} endpoints, the first {most} are used (picker.max_endpoints)"
        self._report("pool", cut if len(every) > most else "", "all are used")
        self._apply(list(every)[:most])

    def _report(self, source: str, problem: str, solved: str = "") -> None:
        """Logs a new problem, and `solved` when there is none any more."""
        if problem != self._problems.get(source, ""):
            log.warning("endpoints (%s): %s", source, problem or solved)
        self._problems[source] = problem


def _open_pool(config: PickerConfig, changed: Callable[[], None]) -> InferencePoolSource:
    """Raises ConfigError."""
    access = KubeAccess.find(config, os.environ)
    try:
        return InferencePoolSource(access, changed)
    except ValueError as error:
        raise ConfigError(f"picker.kube_ca_file: {error}") from None
