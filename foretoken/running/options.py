"""Distributes the options of `foretoken serve` over the config sections."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path

from foretoken.running.engines import ENGINES, OWN
from gateway.readers.formats import check_names
from services.policies.preset import RESIDENCIES, Preset
from services.predictor.config import PredictorConfig
from services.runtime.config import ENV_PREFIX, SECTIONS, ConfigError, load, parse_sets
from services.scheduler.config import SchedulerConfig
from services.worker.backend.config import BackendConfig, check_settings
from services.worker.config import WorkerConfig

SERVICES = ("gateway", "scheduler", "predictor", "batcher", "estimator", "worker")
Sections = dict[str, dict[str, str]]
CORES_PER_GATEWAY = 8
# With predictor.pure the scheduler waits for a forecast; a burst of 1,000 prompts takes 6 to 15 s.
PATIENT = dict.fromkeys(("forecast_patience_s", "forecast_timeout_s", "forecast_late_s"), "30")


def demo_model() -> str:
    """Returns the folder of the demo model."""
    return str(files("models").joinpath("demo"))


@dataclass(frozen=True)
class ServeOptions:
    """The command line; an option that was not given is empty, None or 0."""

    model: str = ""  # a folder; empty: the demo model
    engine: str = OWN  # a name of ENGINES
    served_model_name: str = ""
    # Further models, each with all options of this one: name for clients and folder.
    more_models: Sequence[tuple[str, str]] = ()
    max_model_len: int = 0
    dtype: str = ""
    quantization: str = ""
    speculative_tokens: int = 0
    device: str = ""
    tensor_parallel: int = 0
    lora_modules: Mapping[str, str] = field(default_factory=dict)  # folders by name
    chat_template: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    policy: str = ""
    presets: str = ""
    kv_tokens: int = 0
    kv_dtype: str = ""
    host_gib: float | None = None
    backends: Sequence[str] = ()  # addresses of servers, one for each worker
    backend_key: str = ""
    emulate: str = ""  # hardware; empty: the workers compute
    emulate_lengths: str = ""
    workers: int = 1
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50051
    api_keys: Sequence[str] = field(default_factory=list)
    api_key_file: str = ""
    cors_origins: str = ""
    unknown_fields: str = ""
    batch_folder: str = ""
    state_dir: str = ""
    log_level: str = ""
    gateways: int = 0  # processes; 0: one process has the gateway and the scheduler
    separate: bool = False
    cluster: str = ""  # a key of running/cluster/places.py; empty: this machine
    ui: bool = True
    sets: Sequence[str] = field(default_factory=list)

    @property
    def awaited_workers(self) -> int:
        """Workers that must attach before the system is ready: a backend may answer later."""
        return 1 if self.backends else self.workers


def default_gateways(available: int) -> int:
    """Gateway processes for so many cores: one per 8. On a single core a process of its own would
    only cost time."""
    return 0 if available < 2 else max(1, available // CORES_PER_GATEWAY)


def sections(options: ServeOptions) -> Sections:
    """Returns the overrides of each section; `--set` wins over the named options.

    `--set preset.key=value` replaces a choice of the preset. Raises ConfigError.
    """
    model = options.model or demo_model()
    given = parse_sets(options.sets, [*SECTIONS, "preset"])
    _require_read(given, options.engine)
    check_names(options.tool_call_parser, options.reasoning_parser)
    level = _if_set("log_level", options.log_level.upper() or None)
    short: dict[str, Mapping[str, str]] = {
        "gateway": {
            "model": model,
            "host": options.host,
            "http_port": str(options.http_port),
            "grpc_port": str(options.grpc_port),
        }
        | _if_set("ui", None if options.ui else "off")
        | _if_set("served_model_name", options.served_model_name or None)
        | _if_set("chat_template", _absolute_path(options.chat_template))
        | _if_set("tool_call_parser", options.tool_call_parser or None)
        | _if_set("reasoning_parser", options.reasoning_parser or None)
        | _if_set("api_key_file", _absolute_path(options.api_key_file))
        | _if_set("cors_origins", _as_json_list(options.cors_origins))
        | _if_set("unknown_fields", options.unknown_fields or None)
        | _if_set("batch_folder", _absolute_path(options.batch_folder)),
        "worker": {"model": model}
        | _if_set("max_context_tokens", options.max_model_len or None)
        | _if_set("dtype", options.dtype or None)
        | _if_set("quantization", options.quantization or None)
        | _if_set("speculative_tokens", options.speculative_tokens or None)
        | _if_set("lora_modules", _as_json_paths(options.lora_modules))
        | _if_set("device", options.device or None)
        | _if_set("tensor_parallel", options.tensor_parallel or None)
        | _if_set("kv_tokens", options.kv_tokens or None)
        | _if_set("kv_dtype", options.kv_dtype or None)
        | _if_set("host_gib", options.host_gib),
        "backend": _if_set(
            "urls", json.dumps(list(options.backends)) if options.backends else None
        ),
        "scheduler": _if_set("policy", options.policy or None)
        | _if_set("presets_file", _absolute_path(options.presets)),
    }
    preset = given.pop("preset")
    if preset:
        if "preset" in given["scheduler"]:
            raise ConfigError("use --set preset.key=value or scheduler.preset, not both")
        given["scheduler"]["preset"] = json.dumps(preset)
    levels = dict.fromkeys(SERVICES, level)
    overrides = {
        name: {**levels.get(name, {}), **short.get(name, {}), **given[name]} for name in SECTIONS
    }
    if load(PredictorConfig, overrides["predictor"]).pure:
        overrides["scheduler"] = PATIENT | overrides["scheduler"]
    if _rests_in_int8(overrides):
        overrides["worker"] = {"swap_dtype": "int8"} | overrides["worker"]
    if options.backends:
        worker, backend = overrides["worker"], overrides["backend"]
        check_settings(load(WorkerConfig, worker), load(BackendConfig, backend))
    if options.emulate:
        from foretoken.running.emulation import emulated_sections  # imports the simulator

        return emulated_sections(options.emulate, options.emulate_lengths, overrides)
    return overrides


def model_sections(options: ServeOptions) -> list[Sections]:
    """Returns the overrides of each section for each model. Raises ConfigError."""
    single = replace(options, more_models=())
    further = [
        replace(single, model=folder, served_model_name=name)
        for name, folder in options.more_models
    ]
    return [sections(each) for each in (single, *further)]


def _require_read(given: Mapping[str, Mapping[str, str]], engine: str) -> None:
    """Raises ConfigError for a given setting of a section that only other engines read."""
    for other, kind in ENGINES.items():
        for section in kind.sections:
            if given[section] and section not in ENGINES[engine].sections:
                raise ConfigError(
                    f"{section}.{min(given[section])} needs --engine {other} (got --engine "
                    f"{engine})"
                )


def _rests_in_int8(overrides: Sections) -> bool:
    """Whether the preset keeps paused KV in INT8; a mistake in it is reported later."""
    try:
        return RESIDENCIES[chosen_preset(overrides).residency].int8
    except ValueError:
        return False


def secrets(options: ServeOptions) -> dict[str, str]:
    """Returns the environment variables for values that a process list must not show."""
    keys = json.dumps(list(options.api_keys)) if options.api_keys else ""
    given = {"GATEWAY_API_KEYS": keys, "BACKEND_API_KEY": options.backend_key}
    return {f"{ENV_PREFIX}{name}": value for name, value in given.items() if value}


def chosen_preset(overrides: Sections) -> Preset:
    """Returns the scheduler's preset, so that a mistake ends the start. Raises ValueError."""
    config = load(SchedulerConfig, overrides["scheduler"])
    if config.lease_url:
        raise ConfigError(
            "scheduler.lease_url: `foretoken serve` runs one scheduler; start leader and standby "
            "with `python -m services.scheduler`"
        )
    return config.chosen()


def local_worker(number: int, workers: int) -> dict[str, str]:
    """Returns the settings of worker `number` of `workers` on this machine."""
    return {
        "worker_id": f"worker-{number}",
        "local_rank": str(number),
        "local_workers": str(workers),
    }


def _absolute_path(file: str) -> str | None:
    return str(Path(file).expanduser().absolute()) if file else None


def _as_json_paths(folders: Mapping[str, str]) -> str | None:
    paths = {name: _absolute_path(folder) for name, folder in folders.items()}
    return json.dumps(paths) if paths else None


def _as_json_list(text: str) -> str | None:
    return json.dumps([part.strip() for part in text.split(",")]) if text else None


def _if_set(key: str, value: object) -> dict[str, str]:
    return {} if value is None else {key: str(value)}


def predictor_sections(overrides: Sections, own: dict[str, str]) -> Sections:
    """Returns the sections of the predictor's process; `own` holds defaults.

    The preset chooses the model unless the section does. Raises ValueError.
    """
    chosen = {"model": chosen_preset(overrides).predictor} | own | overrides["predictor"]
    return {"predictor": chosen, "log": overrides["log"]}


def as_arguments(overrides: Sections) -> list[str]:
    """Returns the overrides as command line arguments of a service process."""
    return [
        part
        for section, settings in overrides.items()
        for key, value in settings.items()
        for part in ("--set", f"{section}.{key}={value}")
    ]
