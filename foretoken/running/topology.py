"""Which child processes `foretoken serve` starts, with their settings and addresses.

--gateways 0   the predictor and the workers; the serving process has the control plane
default        also the gateways, and the scheduler with the estimator in its process
--separate     every service as a process of its own, over TCP, as deploy/compose.yaml does

Internal services listen on Unix sockets in one folder, and with `--separate` on free loopback
ports, unless `--set` names an address.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from foretoken.running.children.processes import Child
from foretoken.running.engines import ENGINES, OWN, EngineKind
from foretoken.running.options import Sections, local_worker, predictor_sections
from foretoken.running.ports import free_ports
from services.predictor.config import PredictorConfig
from services.runtime.config import COMMON, ConfigError, load
from services.runtime.outcomelog.config import LogConfig

ADVISERS = ("predictor", "batcher", "estimator")
OF_ONE_GATEWAY = {"address", "gateway_id", "metrics_port"}  # settings
# A scheduler that exits is restarted within this time even on a busy machine; requests wait for it.
SCHEDULER_WAIT = {"scheduler_wait_s": "30"}
Addresses = dict[str, str]  # by process


class Shape(Enum):
    """Which services share a process."""

    EMBEDDED = auto()
    SHARED = auto()
    SEPARATE = auto()


@dataclass(frozen=True)
class Topology:
    """The children in start order, and the addresses at which they are asked for their state."""

    children: Sequence[Child]
    scheduler: str
    predictor: str
    gateways: Sequence[str]  # a Unix socket each, which needs no API key
    metrics_peers: Sequence[str]  # every process but the gateways


def arrange(
    overrides: Sections,
    shape: Shape,
    workers: int,
    gateways: int,
    folder: str,
    engine: str = OWN,
    placed: Sequence[Mapping[str, str]] = (),
) -> Topology:
    """Returns the topology. `folder` is for sockets; EMBEDDED does not use `gateways`. `placed` are
    settings of each worker that runs on another machine.

    The gateways' ports must be chosen already. Raises ValueError for a mistake in the sections of
    predictor and scheduler, and for settings that several gateways cannot share.
    """
    ids = [f"worker-{number}" for number in range(workers)]
    place = _loopback if shape is Shape.SEPARATE else partial(_sockets, folder)
    addresses = place([*ADVISERS, "scheduler", *ids])
    given = {name: overrides[name].get("address") for name in (*ADVISERS, "scheduler")}
    addresses |= {name: address for name, address in given.items() if address}
    children = [
        *_workers(overrides, addresses, ids, ENGINES[engine], placed or [{}] * workers),
        *_schedulers(overrides, addresses, shape),
        _predictor(overrides, addresses),
    ]
    peers = [_seen_at(child) for child in children]
    count = 0 if shape is Shape.EMBEDDED else gateways
    sockets = [f"{folder}/gateway-{number}.sock" for number in range(count)]
    children += _gateways(overrides, addresses["scheduler"], sockets, peers)
    fronts = [f"unix:{socket}" for socket in sockets]
    return Topology(children, addresses["scheduler"], addresses["predictor"], fronts, peers)


def _workers(
    overrides: Sections,
    addresses: Addresses,
    ids: Sequence[str],
    engine: EngineKind,
    placed: Sequence[Mapping[str, str]],
) -> Iterator[Child]:
    shared = {section: overrides[section] for section in engine.sections}
    for number, (worker_id, place) in enumerate(zip(ids, placed, strict=True)):
        settings = {
            "address": addresses[worker_id],
            **local_worker(number, len(ids)),
            "served_model_name": overrides["gateway"].get("served_model_name", ""),
            "scheduler_address": addresses["scheduler"],
            **place,
        } | overrides["worker"]
        name = settings["worker_id"]
        yield _child(overrides, "worker", settings, shared, name, engine.module)


def _predictor(overrides: Sections, addresses: Addresses) -> Child:
    advice = predictor_sections(overrides, {"address": addresses["predictor"]})
    load(PredictorConfig, advice["predictor"])
    load(LogConfig, advice["log"])
    return _child(overrides, "predictor", advice["predictor"], {"log": advice["log"]})


def _schedulers(overrides: Sections, addresses: Addresses, shape: Shape) -> list[Child]:
    """The scheduler, and with SEPARATE the batcher and the estimator."""
    at = {"address": addresses["scheduler"], "predictor_address": addresses["predictor"]}
    match shape:
        case Shape.EMBEDDED:
            return []
        case Shape.SHARED:
            estimator = {"estimator": overrides["estimator"]}
            settings = at | overrides["scheduler"]
            module = "foretoken.running.scheduling"
            return [_child(overrides, "scheduler", settings, estimator, module=module)]
        case Shape.SEPARATE:
            at |= {f"{name}_address": addresses[name] for name in ADVISERS}
            own = {name: {"address": addresses[name]} for name in ("batcher", "estimator")}
            return [
                _child(overrides, name, settings | overrides[name])
                for name, settings in {"scheduler": at, **own}.items()
            ]


def _gateways(
    overrides: Sections, scheduler: str, sockets: Sequence[str], peers: Sequence[str]
) -> Iterator[Child]:
    """The gateways. Each includes the metrics of all processes in its own. Raises ConfigError for a
    setting that several cannot have."""
    for key in OF_ONE_GATEWAY & overrides["gateway"].keys():
        if len(sockets) > 1:
            raise ConfigError(
                f"gateway.{key} is for a single gateway, and there are {len(sockets)}: leave it "
                "out, or set --gateways 1"
            )
    for number, socket in enumerate(sockets):
        others = [f"unix:{other}" for other in sockets if other != socket]
        name = f"gateway-{number}" if others else "gateway"
        defaults = {
            "scheduler_address": scheduler,
            "gateway_id": name if others else "",
            "metrics_peers": json.dumps([*peers, *others]),
        }
        own = {"socket": socket, "replicas": str(len(sockets))}
        settings = SCHEDULER_WAIT | defaults | overrides["gateway"] | own
        yield _child(overrides, "gateway", settings, {}, name, "gateway")


def _child(
    overrides: Sections,
    section: str,
    settings: dict[str, str],
    shared: Sections | None = None,
    name: str = "",
    module: str = "",
) -> Child:
    """A process with its own section, `shared` ones and COMMON. Its name is its section's, its
    module `services.SECTION`, unless given."""
    common = {each: overrides[each] for each in COMMON}
    # The supervisor reports what matters about its children.
    quiet = {"log_level": "WARNING", "started_by": str(os.getpid())}
    sections = {section: quiet | settings, **(shared or {}), **common}
    return Child(name or section, section, module or f"services.{section}", sections)


def _seen_at(child: Child) -> str:
    settings = child.overrides[child.section]
    return settings.get("advertise") or settings["address"]


def _sockets(folder: str, names: Sequence[str]) -> Addresses:
    return {name: f"unix:{folder}/{name}.sock" for name in names}


def _loopback(names: Sequence[str]) -> Addresses:
    ports = free_ports(len(names))
    return {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}
