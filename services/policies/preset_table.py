"""The shipped presets and a user's own.

A user's TOML has rows like presets.toml. A row may say `like = "alise"` to start from a shipped
row, or one above it, and give only the differences. An existing name is refused: in logs and
metrics `alise` always means the same.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from services.policies.preset import CHOICES, Preset, choose, read_row, require_known

TEXTS = ("about", "source")
CELLS = ("like", *CHOICES, "params", *TEXTS)


@dataclass(frozen=True)
class PresetRow:
    """`given` are the parameters that the row itself sets; its others are defaults."""

    preset: Preset
    given: frozenset[str]


def load_preset_rows(file: str = "") -> dict[str, PresetRow]:
    """All rows by name, those of the user's file last. Raises ValueError, which names the row, for
    a mistake in it, and for an unreadable file."""
    known = _shipped()
    if not file:
        return known
    for name, cells in _tables(file).items():
        try:
            known[name] = _added(name, cells, known, file)
        except ValueError as error:
            raise ValueError(f"{file}, [{name}]: {error}") from None
    return known


def load_presets(file: str = "") -> dict[str, Preset]:
    return {name: row.preset for name, row in load_preset_rows(file).items()}


def _shipped() -> dict[str, PresetRow]:
    text = files("services.policies").joinpath("presets.toml").read_text()
    tables = tomllib.loads(text)
    return {
        name: PresetRow(read_row(name, cells), frozenset(cells.get("params", ())))
        for name, cells in tables.items()
    }


def _tables(file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise ValueError(f"cannot read presets from {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no TOML: {error}") from None


def _added(name: str, cells: Any, known: Mapping[str, PresetRow], file: str) -> PresetRow:
    if not isinstance(cells, dict):
        raise ValueError("is no row; a row is a table, [NAME] and its cells")
    if name in known:
        raise ValueError(f'is there already; name yours otherwise, with like = "{name}" in it')
    for key, value in cells.items():
        require_known("cell", key, CELLS)
        kind: type = dict if key == "params" else str
        if not isinstance(value, kind):
            raise ValueError(
                f"{key} takes {'a table' if kind is dict else 'a text'}, got {value!r}"
            )
    texts = {"source": file} | {key: cells[key] for key in TEXTS if key in cells}
    if "like" not in cells:
        if missing := [key for key in CHOICES if key not in cells]:
            raise ValueError(f'has no {", ".join(missing)}; give all, or like = "ROW"')
        return PresetRow(read_row(name, cells | texts), frozenset(cells.get("params", ())))
    base = cells["like"]
    require_known("row", base, known)
    params = cells.get("params", {})
    given = {key: cells[key] for key in CHOICES if key in cells} | params
    preset = choose(base, given, {base: known[base].preset})
    about, source = texts.get("about", f"like {base}"), texts["source"]
    kept = (known[base].given | set(params)) & set(preset.params)
    return PresetRow(replace(preset, name=name, about=about, source=source), frozenset(kept))
