"""Presets: what each policy chooses, as data."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, get_type_hints

from services.scheduler import order, preemption
from services.scheduler.order import ORDERS, Ordering
from services.scheduler.parameters import Param, resolve
from services.scheduler.placement import PLACEMENTS
from services.scheduler.preemption import PREEMPTIONS, never
from services.scheduler.victims import VICTIMS

DEFAULT = "past-future"


@dataclass(frozen=True)
class Residence:
    """What a worker's residency policy means to who plans: whether KV of those that don't run
    may be kept, and whether it then keeps its device memory (`held_fast`)."""

    keeps: bool
    held_fast: bool = False


RESIDENCIES = {
    "recompute": Residence(keeps=False),
    "swap": Residence(keeps=True),
    "defer": Residence(keeps=True, held_fast=True),
    "cost": Residence(keeps=True),
}


@dataclass(frozen=True)
class Preset:
    """One row of presets.toml. `params` are the batcher's numbers, `ordering` those of the order
    and of preemption."""

    name: str
    predictor: str
    batcher: str
    order: str
    placement: str
    preemption: str
    victim: str
    residency: str
    slice_tokens: int
    params: Mapping[str, float] = field(default_factory=dict)
    ordering: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, known in (
            ("order", ORDERS),
            ("placement", PLACEMENTS),
            ("preemption", PREEMPTIONS),
            ("victim", VICTIMS),
            ("residency", RESIDENCIES),
        ):
            _require_known(f"preset.{key}", getattr(self, key), known)
        if self.slice_tokens < 0:
            raise ValueError(f"preset.slice_tokens must not be negative, got {self.slice_tokens}")
        takes = ordering_params(self.order, self.preemption)
        given = resolve("preset.ordering", takes, self.ordering)
        object.__setattr__(self, "ordering", given)  # whole, so that nobody fills it in again

    @property
    def keeps_kv(self) -> bool:
        """Whether a request that does not run may have KV, so that plans must rank them."""
        return RESIDENCIES[self.residency].keeps or PREEMPTIONS[self.preemption] is not never

    def ordered(self) -> Ordering:
        return ORDERS[self.order](self.ordering)


def ordering_params(order_name: str, preemption_name: str) -> dict[str, Param]:
    """The numbers that this order with this preemption takes."""
    return order.PARAMS[order_name] | preemption.PARAMS[preemption_name]


def presets() -> dict[str, Preset]:
    """All rows, by name."""
    text = files("services.scheduler").joinpath("presets.toml").read_text()
    return {name: Preset(name, **row) for name, row in tomllib.loads(text).items()}


def choose(name: str, overrides: Mapping[str, Any] | None = None) -> Preset:
    """The named preset with some choices replaced; keys of `params` and `ordering` may be given
    directly. Numbers that another order or preemption does not take fall away with it.

    Raises ValueError that lists what is known.
    """
    known = presets()
    _require_known("policy", name, known)
    preset = known[name]
    given = dict(overrides or {})
    kinds = get_type_hints(Preset)
    choices = {f.name for f in fields(Preset)} - {"name", "params", "ordering"}
    chosen = {k: _number(k, given.pop(k), kinds[k]) for k in sorted(choices & set(given))}
    preset = _with_choices(preset, chosen)
    for key, value in given.items():
        _require_known("preset key", key, sorted(choices | {*preset.params, *preset.ordering}))
        number = {key: _number(key, value, float)}
        if key in preset.params:
            preset = replace(preset, params={**preset.params, **number})
        else:
            preset = replace(preset, ordering={**preset.ordering, **number})
    return preset


def _with_choices(preset: Preset, chosen: Mapping[str, Any]) -> Preset:
    names = {"order": preset.order, "preemption": preset.preemption} | dict(chosen)
    if names["order"] not in ORDERS or names["preemption"] not in PREEMPTIONS:
        return replace(preset, **chosen)  # which says so
    takes = ordering_params(names["order"], names["preemption"])
    kept = {key: value for key, value in preset.ordering.items() if key in takes}
    return replace(preset, **chosen, ordering=kept)


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
