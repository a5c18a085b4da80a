"""Presets: what each policy chooses, as data."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

from services.policies import interval, slice
from services.policies.form import batches, demand
from services.policies.order.orders import ORDERS
from services.policies.parameters import Param, resolve
from services.policies.place import PLACES
from services.policies.victim import VICTIMS

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

# What each arrangement forms by, with the numbers of each.
FORMS: dict[str, dict[str, dict[str, Param]]] = {
    "continuous": demand.PARAMS,
    "batch": batches.PARAMS,
}


@dataclass(frozen=True)
class Preset:
    """One row of presets.toml: a choice for every stage, and the numbers those choices take
    (all of them, once made: what is left out has its default)."""

    name: str
    predictor: str
    arrangement: str
    order: str
    form: str
    place: str
    slice: str
    interval: str
    victim: str
    residency: str
    params: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_known("preset.arrangement", self.arrangement, FORMS)
        for key, known in self.stages().items():
            _require_known(f"preset.{key}", getattr(self, key), known)
        object.__setattr__(self, "params", resolve("preset", self.takes(), self.params))

    def stages(self) -> dict[str, Iterable[str]]:
        """What each choice may be, given the arrangement."""
        return {
            "order": ORDERS,
            "form": FORMS[self.arrangement],
            "place": PLACES,
            "slice": slice.PARAMS,
            "interval": interval.PARAMS,
            "victim": VICTIMS,
            "residency": RESIDENCIES,
        }

    def takes(self) -> dict[str, Param]:
        """The numbers that these choices take."""
        return (
            ORDERS[self.order].params
            | FORMS[self.arrangement][self.form]
            | slice.PARAMS[self.slice]
            | interval.PARAMS[self.interval]
        )

    @property
    def keeps_kv(self) -> bool:
        """Whether a request that does not run may have KV, so that plans must rank them."""
        return RESIDENCIES[self.residency].keeps or ORDERS[self.order].preempts


CHOICES = tuple(f.name for f in fields(Preset) if f.name not in ("name", "params"))


def presets() -> dict[str, Preset]:
    """All rows, by name."""
    text = files("services.policies").joinpath("presets.toml").read_text()
    return {name: Preset(name, **row) for name, row in tomllib.loads(text).items()}


def choose(name: str, overrides: Mapping[str, Any] | None = None) -> Preset:
    """The named preset with some cells replaced, a choice or a number by its own name. Numbers
    that another choice does not take fall away with the old one.

    Raises ValueError that lists what is known.
    """
    known = presets()
    _require_known("policy", name, known)
    row = known[name]
    given = dict(overrides or {})
    chosen = {key: str(given.pop(key)) for key in CHOICES if key in given}
    bare = Preset(name, **{key: getattr(row, key) for key in CHOICES} | chosen)
    takes = bare.takes()
    kept = {key: value for key, value in row.params.items() if key in takes}
    for key in given:
        if key not in takes and key in (others := _numbers()):
            raise ValueError(f"preset.{key} is a number of preset.{others[key]}; set that too")
        _require_known("preset key", key, [*CHOICES, *takes])
    numbers = {key: _number(key, value) for key, value in given.items()}
    return Preset(name, **{key: getattr(bare, key) for key in CHOICES}, params=kept | numbers)


def _numbers() -> dict[str, str]:
    """Every number there is, with the choice that takes it."""
    stages = {
        "order": {name: order.params for name, order in ORDERS.items()},
        "form": {name: params for forms in FORMS.values() for name, params in forms.items()},
        "slice": slice.PARAMS,
        "interval": interval.PARAMS,
    }
    return {
        number: f"{stage}={choice}"
        for stage, choices in stages.items()
        for choice, params in choices.items()
        for number in params
    }


def _number(key: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"preset.{key} takes a number, got {value!r}") from None


def _require_known(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        close = get_close_matches(name, list(known), n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ValueError(f"unknown {what} {name!r}{hint}; known: {', '.join(known)}")
