"""The engines of `foretoken serve --engine`, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from foretoken.vllm.settings import require_continuous
from foretoken.vllm.worker.config import VllmWorkerConfig
from services.policies.preset import presets
from services.runtime.config import ConfigError
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig

OWN, OTHER_SERVERS = "foretoken", "openai"
Check = Callable[[SchedulerConfig], None]


@dataclass(frozen=True)
class EngineKind:
    """The module of a worker's process, the settings of its section `worker`, and a check that
    raises ValueError, with a sentence, if the engine cannot be used here or by this scheduler.
    `ours`: the checkpoints that foretoken's engine cannot load are refused before the start."""

    module: str
    config: type[WorkerConfig]
    check: Check = lambda _: None
    ours: bool = False
    sections: Sequence[str] = ()  # of settings beside `worker`


def check_vllm(scheduler: SchedulerConfig) -> None:
    if find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm needs vLLM in this environment: install foretoken in the environment of "
            "vLLM 0.30, 0.31 or 0.32, with pip install 'foretoken[vllm]', and run it there"
        )
    known = presets(scheduler.presets_file)
    require_continuous(scheduler.policy, scheduler.chosen(), known)


ENGINES: Mapping[str, EngineKind] = {
    OWN: EngineKind("services.worker", WorkerConfig, ours=True, sections=("emulation",)),
    "vllm": EngineKind("foretoken.vllm.worker", VllmWorkerConfig, check_vllm),
    OTHER_SERVERS: EngineKind("services.worker.backend", WorkerConfig, sections=("backend",)),
}
