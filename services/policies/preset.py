"""Presets: each policy's choices, as data; the shipped ones and those of a user's TOML file."""

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from services.core import Residency
from services.policies.arrange.batch_placement import BATCH_PLACEMENTS, BatchPlacement
from services.policies.estimate import ESTIMATES
from services.policies.form.batch_cuts import CUTS, BatchCut
from services.policies.form.demand import Form
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
    KV, whether it keeps its device memory (`held_fast`), what happens to it when a request is
    `paused`, and whether host memory holds it in INT8 (`int8`)."""

    keeps: bool
    held_fast: bool = False
    paused: Residency = Residency.KEEP
    int8: bool = False


RESIDENCIES = {
    "recompute": Residence(keeps=False),
    "drop": Residence(keeps=False, paused=Residency.DROP),
    "swap": Residence(keeps=True),
    "swap_int8": Residence(keeps=True, int8=True),
    "defer": Residence(keeps=True, held_fast=True),
    "cost": Residence(keeps=True),
}

PLACEMENTS_BY_ARRANGEMENT: dict[str, Mapping[str, Placement | BatchPlacement]] = {
    "continuous": PLACEMENTS,
    "batch": BATCH_PLACEMENTS,
}
FORMS_BY_ARRANGEMENT: dict[str, Mapping[str, Form | BatchCut]] = {
    "continuous": FORMS,
    "batch": CUTS,
}
# Continuous: an ended request leaves and others join. Static: a batch starts together, padded to
# its longest prompt, and no request leaves before all have ended or used up their slice.
BATCH_MODES = ("continuous", "static")
_NO_PARAMS: Mapping[str, Param] = {}


def _stages(arrangement: str) -> dict[str, Mapping[str, Mapping[str, Param]]]:
    forms, placements = FORMS_BY_ARRANGEMENT[arrangement], PLACEMENTS_BY_ARRANGEMENT[arrangement]
    return {
        "estimator": dict.fromkeys(ESTIMATES, _NO_PARAMS),
        "batch_mode": dict.fromkeys(BATCH_MODES, _NO_PARAMS),
        "order": {name: order.params for name, order in ORDERS.items()},
        "form": {name: form.params for name, form in forms.items()},
        "place": {name: placement.params for name, placement in placements.items()},
        "slice": {name: slice_.params for name, slice_ in SLICES.items()},
        "interval": {name: interval.params for name, interval in INTERVALS.items()},
        "victim": dict.fromkeys(VICTIMS, _NO_PARAMS),
        "residency": dict.fromkeys(RESIDENCIES, _NO_PARAMS),
    }


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
        object.__setattr__(self, "params", resolve("preset", self.known_params(), self.params))
        for breaks, sentence in RULES:
            if breaks(self):
                raise ValueError(sentence.format(preset=self, **_ALTERNATIVES))

    def stages(self) -> dict[str, Mapping[str, Mapping[str, Param]]]:
        """The possible choices of each stage for this arrangement, and the parameters of each."""
        return _stages(self.arrangement)

    def known_params(self) -> dict[str, Param]:
        """The parameters of the chosen choices."""
        chosen = (known[getattr(self, stage)] for stage, known in self.stages().items())
        return {name: param for params in chosen for name, param in params.items()}

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

TEXTS = ("about", "source")
CHOICES = tuple(each.name for each in fields(Preset) if each.name not in ("name", "params", *TEXTS))
CELLS = ("like", *CHOICES, "params", *TEXTS)


@dataclass(frozen=True)
class PresetRow:
    """`given` are the parameters that the row itself sets; its others are defaults."""

    preset: Preset
    given: frozenset[str]


def presets(file: str = "") -> dict[str, Preset]:
    """The shipped presets by name, followed by those of a user's file. Raises ValueError as
    `load_preset_rows` does."""
    return {name: row.preset for name, row in load_preset_rows(file).items()}


def load_preset_rows(file: str = "") -> dict[str, PresetRow]:
    """All rows by name, those of the user's file last. Raises ValueError, which names the row, for
    an invalid row, and for an unreadable file."""
    shipped = tomllib.loads(files("services.policies").joinpath("presets.toml").read_text())
    known = {name: _read_row(name, cells) for name, cells in shipped.items()}
    if file:
        for name, cells in _tables(file).items():
            try:
                known[name] = _read_user_row(name, cells, known, file)
            except ValueError as error:
                raise ValueError(f"{file}, [{name}]: {error}") from None
    return known


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
    accepted = bare.known_params()
    kept = {key: value for key, value in row.params.items() if key in accepted}
    for key in given:
        if key not in accepted and (takers := _find_takers(key)):
            raise ValueError(f"preset.{key} is a number of preset.{takers}; set that too")
        require_known("preset key", key, [*CHOICES, *accepted])
    numbers = {key: _parse_number(key, value, accepted[key]) for key, value in given.items()}
    return replace(bare, params=kept | numbers, about=row.about, source=row.source)


def _find_takers(number: str) -> str:
    """The stage and the choices that take this parameter; empty if none does."""
    takers: dict[str, dict[str, None]] = {}
    for arrangement in FORMS_BY_ARRANGEMENT:
        for stage, choices in _stages(arrangement).items():
            for choice in (name for name, params in choices.items() if number in params):
                takers.setdefault(stage, {})[choice] = None
    return " or ".join(f"{stage}={' or '.join(choices)}" for stage, choices in takers.items())


def _read_row(name: str, cells: Mapping[str, Any]) -> PresetRow:
    """Parses a complete table. Raises ValueError for anything unknown in it."""
    bare = Preset(name, **{key: value for key, value in cells.items() if key != "params"})
    accepted, given = bare.known_params(), cells.get("params", {})
    numbers = {key: _parse_number(key, value, accepted.get(key)) for key, value in given.items()}
    return PresetRow(replace(bare, params=numbers), frozenset(given))


def _tables(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"cannot read presets from {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid TOML: {error}") from None


def _read_user_row(name: str, cells: Any, known: Mapping[str, PresetRow], file: str) -> PresetRow:
    """A row with `like` starts from that row and gives only the differences. An existing name is
    refused: in logs and metrics `alise` always means the same."""
    if not isinstance(cells, dict):
        raise ValueError("must be a table: [NAME], then one line for each cell")
    if name in known:
        raise ValueError(f'the name exists; choose another, with like = "{name}" in it')
    for key, value in cells.items():
        require_known("cell", key, CELLS)
        kind: type = dict if key == "params" else str
        if not isinstance(value, kind):
            expected = "a table" if kind is dict else "a string"
            raise ValueError(f"{key} must be {expected}, got {value!r}")
    texts = {"source": file} | {key: cells[key] for key in TEXTS if key in cells}
    if "like" not in cells:
        if missing := [key for key in CHOICES if key not in cells]:
            raise ValueError(f'{", ".join(missing)} missing; give all choices, or like = "ROW"')
        return _read_row(name, cells | texts)
    base = cells["like"]
    require_known("row", base, known)
    params = cells.get("params", {})
    given = {key: cells[key] for key in CHOICES if key in cells} | params
    preset = choose(base, given, {base: known[base].preset})
    about, source = texts.get("about", f"like {base}"), texts["source"]
    kept = (known[base].given | set(params)) & set(preset.params)
    return PresetRow(replace(preset, name=name, about=about, source=source), frozenset(kept))


def _parse_number(key: str, value: Any, param: Param | None) -> float:
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
