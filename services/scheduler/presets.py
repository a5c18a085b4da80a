"""Presets: what each policy chooses, as data."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, get_type_hints

from services.scheduler.order import ORDERS
from services.scheduler.placement import PLACEMENTS
from services.scheduler.victims import VICTIMS

DEFAULT = "past-future"
RESIDENCIES = ("recompute",)


@dataclass(frozen=True)
class Preset:
    """One row of presets.toml."""

    name: str
    predictor: str
    batcher: str
    order: str
    placement: str
    victim: str
    residency: str
    slice_tokens: int
    params: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, known in (
            ("order", ORDERS),
            ("placement", PLACEMENTS),
            ("victim", VICTIMS),
            ("residency", RESIDENCIES),
        ):
            _require_known(f"preset.{key}", getattr(self, key), known)
        if self.slice_tokens < 0:
            raise ValueError(f"preset.slice_tokens must not be negative, got {self.slice_tokens}")


def presets() -> dict[str, Preset]:
    """All rows, by name."""
    text = files("services.scheduler").joinpath("presets.toml").read_text()
    return {name: Preset(name, **row) for name, row in tomllib.loads(text).items()}


def choose(name: str, overrides: Mapping[str, Any] | None = None) -> Preset:
    """The named preset with some choices replaced; keys of `params` may be given directly.

    Raises ValueError that lists what is known.
    """
    known = presets()
    _require_known("policy", name, known)
    preset = known[name]
    choices = {f.name for f in fields(Preset)} - {"name", "params"}
    for key, value in (overrides or {}).items():
        _require_known("preset key", key, sorted(choices | set(preset.params)))
        if key in preset.params:
            preset = replace(preset, params={**preset.params, key: _number(key, value, float)})
        else:
            kind = get_type_hints(Preset)[key]
            preset = replace(preset, **{key: _number(key, value, kind)})
    return preset


def _number(key: str, value: Any, kind: type) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"preset.{key} takes a {kind.__name__}, got {value!r}") from None


def _require_known(what: str, name: str, known: Any) -> None:
    if name not in known:
        close = get_close_matches(name, list(known), n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ValueError(f"unknown {what} {name!r}{hint}; known: {', '.join(known)}")
