"""The engines of `foretoken serve`: what serves a worker's requests."""

from collections.abc import Mapping

OWN_ENGINE, OTHER_SERVERS = "own", "openai"
# The module of a worker's process.
ENGINES: Mapping[str, str] = {
    OWN_ENGINE: "services.worker",
    OTHER_SERVERS: "services.worker.backend",
}
