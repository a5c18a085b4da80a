"""`foretoken serve`'s options, spread over the sections they belong to."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from services.policies.preset import Preset
from services.predictor.predictors import READS
from services.runtime.config import SECTIONS, ConfigError, load, parse_sets
from services.runtime.outcomelog.config import LogConfig
from services.scheduler.config import SchedulerConfig

Sections = dict[str, dict[str, str]]


def demo_model() -> str:
    """The model that ships with foretoken."""
    return str(files("models").joinpath("demo"))


@dataclass(frozen=True)
class ServeOptions:
    """What was asked on the command line; empty, None, or 0 KV tokens where it was left out."""

    model: str = ""
    policy: str = ""
    presets: str = ""
    kv_tokens: int = 0
    kv_dtype: str = ""
    host_gib: float | None = None
    workers: int = 1
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50051
    separate: bool = False
    sets: Sequence[str] = field(default_factory=list)


def sections(options: ServeOptions) -> Sections:
    """Overrides for each section; `--set` wins over the short options.

    `--set preset.key=value` replaces a choice of the preset. Raises ConfigError.
    """
    model = options.model or demo_model()
    given = parse_sets(options.sets, [*SECTIONS, "preset"])
    presets = str(Path(options.presets).absolute()) if options.presets else None
    short: dict[str, Mapping[str, str]] = {
        "gateway": {
            "model": model,
            "host": options.host,
            "http_port": str(options.http_port),
            "grpc_port": str(options.grpc_port),
        },
        "worker": {"model": model}
        | _if_set("kv_tokens", options.kv_tokens or None)
        | _if_set("kv_dtype", options.kv_dtype or None)
        | _if_set("host_gib", options.host_gib),
        "scheduler": _if_set("policy", options.policy or None) | _if_set("presets_file", presets),
    }
    preset = given.pop("preset")
    if preset:
        if "preset" in given["scheduler"]:
            raise ConfigError("give --set preset.key=value or scheduler.preset, not both")
        given["scheduler"]["preset"] = json.dumps(preset)
    return {name: {**short.get(name, {}), **given[name]} for name in SECTIONS}


def chosen_preset(overrides: Sections) -> Preset:
    """The scheduler's preset: a mistake in it should end the start, not the first request. Raises
    ValueError."""
    return load(SchedulerConfig, overrides["scheduler"]).chosen()


def local_worker(number: int, workers: int) -> dict[str, str]:
    """What the worker of this number, of so many on this machine, is told of itself."""
    return {
        "worker_id": f"worker-{number}",
        "local_rank": str(number),
        "local_workers": str(workers),
    }


def _if_set(key: str, value: object) -> dict[str, str]:
    return {} if value is None else {key: str(value)}


def outcome_log(overrides: Sections, predictor: str) -> dict[str, str]:
    """Overrides of `log`. What a predictor that reads prompts has learnt outlives the process,
    in the user's state folder, unless the log was given a place or, empty, none."""
    given = overrides["log"]
    if predictor not in READS or "path" in load(LogConfig, given).model_fields_set:
        return given
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return {"path": str(state / "foretoken" / "outcomes.sqlite"), **given}


def predictor_sections(overrides: Sections, own: dict[str, str]) -> Sections:
    """What the predictor's process is told; `own` where its section does not say otherwise. The
    preset chooses its model unless its section does. Raises ValueError."""
    chosen = {"model": chosen_preset(overrides).predictor} | own | overrides["predictor"]
    return {"predictor": chosen, "log": outcome_log(overrides, chosen["model"])}


def as_arguments(overrides: Sections) -> list[str]:
    """The same overrides as a service process takes them."""
    return [
        part
        for section, settings in overrides.items()
        for key, value in settings.items()
        for part in ("--set", f"{section}.{key}={value}")
    ]
