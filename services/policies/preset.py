"""Presets: each policy's choices, as data."""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

from services.core import Residency
from services.policies.arrange.batch_placement import BATCH_PLACEMENTS, BatchPlacement
from services.policies.estimate import ESTIMATES
from services.policies.form.batch_cuts import CUTS
from services.policies.form.registry import FORMS
from services.policies.interval import INTERVALS
from services.policies.order.registry import ORDERS
from services.policies.parameters import Param, resolve
from services.policies.place.placements import PLACEMENTS, Placement
from services.policies.slice import SLICES
from services.policies.victim import VICTIMS

DEFAULT = "foretoken"


@dataclass(frozen=True)
class Residence:
    """What a worker's residency policy means for planning: whether requests that do not run keep
    KV, whether it keeps its device memory (`held_fast`), and what happens to it when a request
    is `paused`."""

    keeps: bool
    held_fast: bool = False
    paused: Residency = Residency.KEEP


RESIDENCIES = {
    "recompute": Residence(keeps=False),
    "drop": Residence(keeps=False, paused=Residency.DROP),
    "swap": Residence(keeps=True),
    "defer": Residence(keeps=True, held_fast=True),
    "cost": Residence(keeps=True),
}

# The forms of each arrangement, with their parameters.
FORMS_BY_ARRANGEMENT: dict[str, dict[str, dict[str, Param]]] = {
    "continuous": {name: form.params for name, form in FORMS.items()},
    "batch": {name: cut.params for name, cut in CUTS.items()},
}
PLACEMENTS_BY_ARRANGEMENT: dict[str, Mapping[str, Placement | BatchPlacement]] = {
    "continuous": PLACEMENTS,
    "batch": BATCH_PLACEMENTS,
}
# Continuous: an ended request leaves and others join. Static: a batch starts together, padded to
# its longest prompt, and no request leaves before all have ended or used up their slice.
BATCH_MODES = ("continuous", "static")


@dataclass(frozen=True)
class Preset:
    """One row of presets.toml: a choice for every stage, and the parameters of those choices,
    defaults filled in. `about` describes it in one line; `source` cites its origin."""

    name: str
    predictor: str
    estimator: str
    arrangement: str
    batch_mode: str
    order: str
    form: str
    place: str
    slice: str
    interval: str
    victim: str
    residency: str
    params: Mapping[str, float] = field(default_factory=dict)
    about: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        require_known("preset.arrangement", self.arrangement, FORMS_BY_ARRANGEMENT)
        for key, known in self.stages().items():
            require_known(f"preset.{key}", getattr(self, key), known)
        object.__setattr__(self, "params", resolve("preset", self.takes(), self.params))
        for breaks, sentence in RULES:
            if breaks(self):
                raise ValueError(sentence.format(preset=self, **_ALTERNATIVES))

    def stages(self) -> dict[str, Iterable[str]]:
        """The possible choices of each stage for an arrangement."""
        return {
            "estimator": ESTIMATES,
            "batch_mode": BATCH_MODES,
            "order": ORDERS,
            "form": FORMS_BY_ARRANGEMENT[self.arrangement],
            "place": PLACEMENTS_BY_ARRANGEMENT[self.arrangement],
            "slice": SLICES,
            "interval": INTERVALS,
            "victim": VICTIMS,
            "residency": RESIDENCIES,
        }

    def numbers(self) -> dict[str, dict[str, Param]]:
        """The parameters of these choices, by stage."""
        return {
            "order": ORDERS[self.order].params,
            "form": FORMS_BY_ARRANGEMENT[self.arrangement][self.form],
            "place": PLACEMENTS_BY_ARRANGEMENT[self.arrangement][self.place].params,
            "slice": SLICES[self.slice].params,
            "interval": INTERVALS[self.interval].params,
        }

    def takes(self) -> dict[str, Param]:
        """The parameters of these choices."""
        return {name: param for stage in self.numbers().values() for name, param in stage.items()}

    @property
    def keeps_kv(self) -> bool:
        """Whether a request that does not run may have KV, so that plans must rank it."""
        return RESIDENCIES[self.residency].keeps or ORDERS[self.order].preempts

    @property
    def static(self) -> bool:
        return self.batch_mode == "static"


# Combinations that cannot work: a test for each, and the sentence that names a working choice.
RULES: list[tuple[Callable[[Preset], bool], str]] = [
    (
        lambda preset: preset.static and preset.arrangement != "batch",
        "preset.batch_mode=static needs preset.arrangement=batch, since with {preset.arrangement} "
        "requests join running ones: set preset.arrangement=batch too, or batch_mode=continuous",
    ),
    (
        lambda preset: preset.arrangement == "batch" and ORDERS[preset.order].preempts,
        "preset.order={preset.order} preempts running requests, but with preset.arrangement=batch "
        "a batch runs until it has ended: set preset.arrangement=continuous, or an order that does "
        "not preempt: {patient}",
    ),
]
_ALTERNATIVES = {"patient": ", ".join(name for name, order in ORDERS.items() if not order.preempts)}

CHOICES = tuple(
    f.name for f in fields(Preset) if f.name not in ("name", "params", "about", "source")
)


def presets() -> dict[str, Preset]:
    """All rows, by name."""
    text = files("services.policies").joinpath("presets.toml").read_text()
    return {name: read_row(name, row) for name, row in tomllib.loads(text).items()}


def read_row(name: str, row: Mapping[str, Any]) -> Preset:
    """Parses a table of presets.toml. Raises ValueError for anything unknown in it."""
    bare = Preset(name, **{key: value for key, value in row.items() if key != "params"})
    takes = bare.takes()
    given = row.get("params", {})
    numbers = {key: _number(key, value, takes.get(key)) for key, value in given.items()}
    return replace(bare, params=numbers)


def choose(
    name: str,
    overrides: Mapping[str, Any] | None = None,
    known: Mapping[str, Preset] | None = None,
) -> Preset:
    """The named preset with some cells replaced: a choice, or a parameter by its own name.
    Parameters that a new choice does not take are dropped with the old one.

    `known` are the rows to choose from, by default those that ship with foretoken. Raises
    ValueError that lists the known names.
    """
    known = presets() if known is None else known
    require_known("policy", name, known)
    row = known[name]
    given = dict(overrides or {})
    chosen = {key: str(given.pop(key)) for key in CHOICES if key in given}
    bare = Preset(name, **{key: getattr(row, key) for key in CHOICES} | chosen)
    takes = bare.takes()
    kept = {key: value for key, value in row.params.items() if key in takes}
    for key in given:
        if key not in takes and key in (others := _numbers()):
            raise ValueError(f"preset.{key} is a number of preset.{others[key]}; set that too")
        require_known("preset key", key, [*CHOICES, *takes])
    numbers = {key: _number(key, value, takes.get(key)) for key, value in given.items()}
    return replace(bare, params=kept | numbers, about=row.about, source=row.source)


def _numbers() -> dict[str, str]:
    """Every parameter, with the choices that take it."""
    stages = {
        "order": {name: order.params for name, order in ORDERS.items()},
        "form": {
            name: params
            for forms in FORMS_BY_ARRANGEMENT.values()
            for name, params in forms.items()
        },
        "place": {
            name: place.params
            for each in PLACEMENTS_BY_ARRANGEMENT.values()
            for name, place in each.items()
        },
        "slice": {name: each.params for name, each in SLICES.items()},
        "interval": {name: each.params for name, each in INTERVALS.items()},
    }
    takers: dict[str, str] = {}
    for stage, choices in stages.items():
        for choice, params in choices.items():
            for number in params:
                others = f"{takers[number]} or " if number in takers else f"{stage}="
                takers[number] = f"{others}{choice}"
    return takers


def _number(key: str, value: Any, param: Param | None = None) -> float:
    if param and param.names and value in param.names:
        return float(param.names.index(value))
    if param and param.names:
        raise ValueError(f"preset.{key} is one of {', '.join(param.names)}, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"preset.{key} takes a number, got {value!r}") from None


def require_known(what: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        close = get_close_matches(name, list(known), n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ValueError(f"unknown {what} {name!r}{hint}; known: {', '.join(known)}")
