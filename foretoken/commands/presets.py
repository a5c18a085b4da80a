"""`foretoken presets`: the rows there are, and what one of them chooses."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from services.policies.parameters import Param
    from services.policies.preset import Preset
    from services.policies.preset_table import PresetRow

INDENT = "  "


def presets(
    name: Annotated[
        str, typer.Argument(help="A row to print whole; all in a line each without.")
    ] = "",
    file: Annotated[str, typer.Option("--presets", metavar="FILE", help="TOML of more rows.")] = "",
) -> None:
    """List the policies there are, or print one: what it chooses, and where it is from."""
    from services.policies.preset import require_known
    from services.policies.preset_table import load_preset_rows

    known = load_preset_rows(file)
    if name:
        require_known("preset", name, known)
        lines = described(known[name], file)
    else:
        lines = listed(known)
    for line in lines:
        print(line)


def listed(known: "Mapping[str, PresetRow]") -> Iterator[str]:
    from services.policies.preset import DEFAULT

    width = max(map(len, known))
    for name, row in known.items():
        mark = " (the default)" if name == DEFAULT else ""
        yield f"{name:<{width}}  {row.preset.about}{mark}".rstrip()


def described(row: "PresetRow", file: str = "") -> Iterator[str]:
    """Every choice, with the others there are, and under it the numbers that it takes."""
    from services.policies.preset import FORMS_BY_ARRANGEMENT

    preset = row.preset
    yield f"{preset.name}: {preset.about}"
    yield f"from {preset.source}"
    yield ""
    stages, numbers = preset.stages(), preset.numbers()
    yield from _choice("predictor", preset.predictor, ())
    yield from _choice("arrangement", preset.arrangement, FORMS_BY_ARRANGEMENT)
    for stage, known in stages.items():
        yield from _choice(stage, getattr(preset, stage), known)
        for number, param in numbers.get(stage, {}).items():
            yield _number(preset, number, param, number in row.given)
    yield ""
    more = f" --presets {file}" if file else ""
    command = f"foretoken serve{more} --policy {preset.name} --set preset.KEY=VALUE"
    yield f"{command} replaces any of them."


def _choice(stage: str, chosen: str, known: Iterable[str]) -> Iterator[str]:
    others = ", ".join(name for name in known if name != chosen)
    yield f"{stage:<18}{chosen:<16}{f'or {others}' if others else ''}".rstrip()


def _number(preset: "Preset", name: str, param: "Param", given: bool) -> str:
    value = param.shown(preset.params[name])
    bounds = " | ".join(param.names) if param.names else f"{param.least:.10g} to {param.most:.10g}"
    origin = "" if given else "default; "
    return f"{INDENT}{name:<16}{value:<16}{origin}{bounds}"
