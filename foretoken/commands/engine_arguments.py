"""Checks the options of `foretoken serve` that choose an engine, and where it runs."""

import os
from collections.abc import Sequence

from foretoken.commands.usage import UsageError, near

BACKEND_KEY_VARIABLE = "FORETOKEN_BACKEND_API_KEY"


def check_cluster(cluster: str, engine: str) -> None:
    """Raises UsageError for an unknown cluster, and for an engine that computes nothing there."""
    from foretoken.running.cluster.places import CLUSTERS
    from foretoken.running.engines import OTHER_SERVERS

    if cluster not in CLUSTERS:
        raise UsageError(f"--cluster takes {', '.join(filter(None, CLUSTERS))}; got {cluster!r}")
    if cluster and engine == OTHER_SERVERS:
        raise UsageError(
            f"leave out --cluster with --engine {engine}: other servers compute, and this machine "
            "reaches them"
        )


def count_workers(
    engine: str, backends: Sequence[str], backend_key: str, workers: int, emulate: str
) -> int:
    """The number of workers: one for each backend, else as given. Raises UsageError for an unknown
    engine, and for options that contradict each other."""
    from foretoken.running.engines import ENGINES, OTHER_SERVERS, OWN

    if engine not in ENGINES:
        raise UsageError(
            f"--engine takes {', '.join(ENGINES)}; got {engine!r}{near(engine, ENGINES)}"
        )
    if emulate and engine != OWN:
        raise UsageError(f"give either --emulate or --engine {engine}: each is an engine")
    if engine != OTHER_SERVERS:
        # A key in the environment may be for other runs.
        has_key = backend_key != os.environ.get(BACKEND_KEY_VARIABLE, "")
        for option, given in (("--backend", backends), ("--backend-key", has_key)):
            if given:
                raise UsageError(f"{option} needs --engine {OTHER_SERVERS} (got --engine {engine})")
        return workers
    if not backends:
        raise UsageError(
            f"--engine {OTHER_SERVERS} needs --backend URL, the address of an OpenAI-compatible "
            "server; repeat it for further ones"
        )
    if workers not in (1, len(backends)):
        raise UsageError(
            f"leave out --workers: there is one for each --backend, and {len(backends)} are given"
        )
    _require_distinct(backends)
    return len(backends)


def _require_distinct(backends: Sequence[str]) -> None:
    from services.worker.backend.config import normalise_url

    known: set[str] = set()
    for url in backends:
        try:
            address = normalise_url(url)
        except ValueError as error:
            raise UsageError(f"--backend: {error}") from None
        if address in known:
            raise UsageError(f"--backend {url} is given twice")
        known.add(address)
