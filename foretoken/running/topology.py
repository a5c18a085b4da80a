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
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path

from foretoken.running.children.processes import Child
from foretoken.running.engines import ENGINES, OWN, EngineKind
from foretoken.running.options import Sections, local_worker, predictor_sections
from foretoken.running.ports import free_ports
from gateway.config import GatewayConfig
from services.predictor.config import PredictorConfig
from services.runtime.config import COMMON, ConfigError, load
from services.runtime.outcomelog.config import LogConfig

ADVISERS = ("predictor", "batcher", "estimator")
OF_ONE_GATEWAY = {"address", "gateway_id", "metrics_port"}  # settings
NAMED_BY_ENTRY = {"model", "served_model_name"}  # settings that each entry of gateway.models has
# A scheduler that exits is restarted within this time even on a busy machine; requests wait for it.
SCHEDULER_WAIT = {"scheduler_wait_s": "30"}
Addresses = dict[str, str]  # by process


class Shape(Enum):
    """Which services share a process."""

    EMBEDDED = auto()
    SHARED = auto()
    SEPARATE = auto()


@dataclass(frozen=True)
class ModelProcesses:
    """The processes of one model in start order, and the addresses of two of them."""

    name: str
    folder: str
    children: Sequence[Child]
    scheduler: str
    predictor: str


@dataclass(frozen=True)
class Topology:
    """The children in start order, and the addresses at which they are asked for their state."""

    children: Sequence[Child]
    models: Sequence[ModelProcesses]
    gateways: Sequence[str]  # a Unix socket each, which needs no API key
    metrics_peers: Sequence[str]  # every process but the gateways


def arrange(
    models: Sequence[Sections],
    shape: Shape,
    workers: int,
    gateways: int,
    folder: str,
    engine: str = OWN,
    placed: Sequence[Mapping[str, str]] = (),
) -> Topology:
    """Returns the topology of `models`, each with `workers` workers; the gateways have the settings
    of the first. `folder` is for sockets; EMBEDDED does not use `gateways`. `placed` are settings
    of each worker that runs on another machine.

    The gateways' ports must be chosen already. Raises ValueError for a mistake in the sections of
    predictor and scheduler, and for settings that several gateways or models cannot share.
    """
    total = workers * len(models)
    places = [
        {**local_worker(number, total), **place}
        for number, place in zip(range(total), placed or [{}] * total, strict=True)
    ]
    served = [
        _arrange_model(
            overrides,
            shape,
            folder,
            marks,
            places[at * workers : (at + 1) * workers],
            ENGINES[engine],
        )
        for at, (overrides, marks) in enumerate(_tell_apart(models))
    ]
    _require_distinct(served)
    children = [child for each in served for child in each.children]
    peers = [_seen_at(child) for child in children]
    count = 0 if shape is Shape.EMBEDDED else gateways
    sockets = [f"{folder}/gateway-{number}.sock" for number in range(count)]
    children += _gateways(models[0], served, sockets, peers)
    fronts = [f"unix:{socket}" for socket in sockets]
    return Topology(children, served, fronts, peers)


@dataclass(frozen=True)
class Marks:
    """What tells the processes of several models apart: the beginning of their sockets' names, and
    the end of their own."""

    socket: str = ""
    process: str = ""


def _tell_apart(models: Sequence[Sections]) -> Sequence[tuple[Sections, Marks]]:
    """The sections and marks of each model. Of several, services that do not name their model in
    their metrics have a label for it."""
    if len(models) == 1:
        return [(models[0], Marks())]
    marked = []
    for at, overrides in enumerate(models):
        name = load(GatewayConfig, overrides["gateway"]).model_name
        label = {"model_label": name}
        labelled = {each: label | overrides[each] for each in (*ADVISERS, "scheduler")}
        marked.append((overrides | labelled, Marks(f"{at}-", f" of {name}")))
    return marked


def _require_distinct(models: Sequence[ModelProcesses]) -> None:
    """Raises ConfigError for a name or an address of `--set` that several models would have."""
    if len({each.name for each in models}) < len(models):
        raise ConfigError(
            "gateway.served_model_name is for one model, and there are several: write NAME=MODEL "
            "for each instead"
        )
    addresses = [{_seen_at(child) for child in each.children} for each in models]
    if len(set().union(*addresses)) < sum(map(len, addresses)):
        raise ConfigError(
            "an address of --set is for one model, and there are several: leave it out"
        )


def _arrange_model(
    overrides: Sections,
    shape: Shape,
    folder: str,
    marks: Marks,
    workers: Sequence[Mapping[str, str]],
    engine: EngineKind,
) -> ModelProcesses:
    """The processes of a model. `workers` are the place of each."""
    sockets = partial(_sockets, f"{folder}/{marks.socket}")
    place = _loopback if shape is Shape.SEPARATE else sockets
    addresses = place([*ADVISERS, "scheduler", *(each["worker_id"] for each in workers)])
    given = {name: overrides[name].get("address") for name in (*ADVISERS, "scheduler")}
    addresses |= {name: address for name, address in given.items() if address}
    children = [
        *_workers(overrides, addresses, workers, engine),
        *_schedulers(overrides, addresses, shape),
        _predictor(overrides, addresses),
    ]
    gateway = load(GatewayConfig, overrides["gateway"])
    return ModelProcesses(
        gateway.model_name,
        gateway.model,
        [replace(child, name=child.name + marks.process) for child in children],
        addresses["scheduler"],
        addresses["predictor"],
    )


def _workers(
    overrides: Sections,
    addresses: Addresses,
    places: Sequence[Mapping[str, str]],
    engine: EngineKind,
) -> Iterator[Child]:
    shared = {section: overrides[section] for section in engine.sections}
    for place in places:
        settings = {
            "address": addresses[place["worker_id"]],
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


def _with_schedulers(given: Mapping[str, str], models: Sequence[ModelProcesses]) -> dict[str, str]:
    """The given settings of a gateway, and those by which it finds the schedulers."""
    if len(models) == 1:
        return {"scheduler_address": models[0].scheduler, **given}
    entries = {
        each.name: {"model": each.folder, "scheduler_address": each.scheduler} for each in models
    }
    shared = {key: value for key, value in given.items() if key not in NAMED_BY_ENTRY}
    return {**shared, "models": json.dumps(entries)}


def _gateways(
    overrides: Sections,
    models: Sequence[ModelProcesses],
    sockets: Sequence[str],
    peers: Sequence[str],
) -> Iterator[Child]:
    """The gateways. Each includes the metrics of all processes in its own. Raises ConfigError for a
    setting that several cannot have."""
    for key in OF_ONE_GATEWAY & overrides["gateway"].keys():
        if len(sockets) > 1:
            raise ConfigError(
                f"gateway.{key} is for a single gateway, and there are {len(sockets)}: leave it "
                "out, or set --gateways 1"
            )
    given = _with_schedulers(overrides["gateway"], models)
    for number, socket in enumerate(sockets):
        others = [f"unix:{other}" for other in sockets if other != socket]
        name = f"gateway-{number}" if others else "gateway"
        defaults = {
            "gateway_id": name if others else "",
            "metrics_peers": json.dumps([*peers, *others]),
            "responses_file": str(Path(socket).with_name("responses.db")) if others else "",
        }
        own = {"socket": socket, "replicas": str(len(sockets))}
        settings = SCHEDULER_WAIT | defaults | given | own
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


def _sockets(prefix: str, names: Sequence[str]) -> Addresses:
    return {name: f"unix:{prefix}{name}.sock" for name in names}


def _loopback(names: Sequence[str]) -> Addresses:
    ports = free_ports(len(names))
    return {name: f"127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)}
