"""Settings of the scheduler inside vLLM: the environment, or a TOML file that it names."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gateway.config import SLA_CLASSES, SlaClass
from services.core import Sla
from services.policies.preset import DEFAULT, Preset, choose, presets
from services.runtime.config import ConfigError, Settings, load

FILE_VARIABLE = "FORETOKEN_VLLM_FILE"  # sets `file`
# vLLM frees the blocks of a request that it preempts: its KV is computed again.
RESIDENCY = "drop"


class VllmConfig(Settings):
    """Section `vllm`: FORETOKEN_POLICY, FORETOKEN_VLLM_<KEY>, or a key of the TOML file."""

    section: ClassVar[str] = "vllm"

    file: str = ""  # TOML with keys of this section; the environment replaces them
    policy: str = DEFAULT  # a preset of services/policies/presets.toml, or of presets_file
    preset: dict[str, Any] = Field(default_factory=dict)  # replaced choices of the preset
    presets_file: str = ""  # TOML with more presets
    # Forecasts in this process: `words` reads prompts (0.3 ms each, in a thread), `history` knows
    # only recent lengths, `max` expects max_tokens. Empty: the preset's, or else `words`.
    predictor: Literal["", "words", "history", "max"] = ""
    # host:port of a predictor service (`python -m services.predictor`) that forecasts instead, with
    # an encoder or a trained model. Steps do not wait for it; while it is late, history answers.
    predictor_address: str = ""
    # Share of the time for rounds, which run beside vLLM's steps and take the interpreter from
    # them: a round of 256 running and 2,000 waiting requests takes milliseconds.
    round_share: float = Field(default=0.2, gt=0, le=1)
    # SLA of requests that name none, and the classes that they may name in
    # `vllm_xargs: {"x-foretoken-sla": "interactive"}`.
    default_sla: str = "standard"
    sla_classes: dict[str, SlaClass] = Field(default_factory=lambda: dict(SLA_CLASSES))
    # Share of each tenant (cache_salt) against the others; the default is 1.
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    # Port in vLLM's engine process that serves foretoken's metrics at /metrics; 0: none. With data
    # parallelism, engine k has this port + k.
    metrics_port: int = Field(default=0, ge=0, le=65_535)
    metrics_host: str = "127.0.0.1"  # of metrics_port; local by default, metrics are for operators
    # Start with a vLLM that this version of foretoken was not tested with.
    untested_vllm: bool = False

    def chosen(self) -> Preset:
        """The preset to schedule by. Raises ValueError for unknown or incompatible choices."""
        if self.predictor and self.predictor_address:
            raise ValueError(
                f"vllm.predictor={self.predictor} forecasts in this process and "
                f"vllm.predictor_address={self.predictor_address} by a service: leave one out"
            )
        if "residency" in self.preset:
            raise ValueError(
                f"vllm.preset sets residency, which is always {RESIDENCY} inside vLLM: leave it out"
            )
        known = presets(self.presets_file)
        preset = choose(self.policy, {**self.preset, "residency": RESIDENCY}, known)
        require_continuous(self.policy, preset, known)
        return preset

    def classes(self) -> dict[str, Sla]:
        """The SLA classes by name. Raises ValueError for an unknown default."""
        classes = {name: given.named(name) for name, given in self.sla_classes.items()}
        if self.default_sla not in classes:
            raise ValueError(
                f"unknown vllm.default_sla {self.default_sla!r}; known: {', '.join(classes)}"
            )
        return classes


def require_continuous(name: str, preset: Preset, known: Mapping[str, Preset]) -> None:
    """Raises ValueError if the preset serves static batches."""
    if preset.arrangement != "continuous":
        usable = (name for name, row in known.items() if row.arrangement == "continuous")
        raise ValueError(
            f"the policy {name} serves static batches, but vLLM batches continuously; "
            f"choose one of {', '.join(usable)}"
        )


def load_settings() -> VllmConfig:
    """Reads the environment, which replaces keys of the file. Raises ConfigError with a
    sentence."""
    path = os.environ.get(FILE_VARIABLE, "")
    return load(VllmConfig, defaults=_read_file(path) if path else None)


def _read_file(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{FILE_VARIABLE}: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{FILE_VARIABLE}: {path} is not valid TOML: {error}") from None
