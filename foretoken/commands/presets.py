"""`foretoken presets`: list the presets, or print one with its alternatives."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from services.policies.parameters import Param
    from services.policies.preset import Preset, PresetRow

INDENT = "  "


def presets(
    name: Annotated[
        str, typer.Argument(help="Preset to print in full; without it, all are listed.")
    ] = "",
    file: Annotated[
        str, typer.Option("--presets", metavar="FILE", help="TOML file with more presets.")
    ] = "",
) -> None:
    """List the presets, or print the choices, numbers and source of one."""
    from services.policies.preset import load_preset_rows, require_known

    known = load_preset_rows(file)
    if name:
        require_known("preset", name, known)
        lines = describe(known[name], file)
    else:
        lines = list_presets(known)
    for line in lines:
        print(line)


def list_presets(known: "Mapping[str, PresetRow]") -> Iterator[str]:
    from services.policies.preset import DEFAULT

    width = max(map(len, known))
    for name, row in known.items():
        mark = " (the default)" if name == DEFAULT else ""
        yield f"{name:<{width}}  {row.preset.about}{mark}".rstrip()


def describe(row: "PresetRow", file: str = "") -> Iterator[str]:
    """Yields each choice with its alternatives, and below it the numbers it takes."""
    from services.policies.preset import FORMS_BY_ARRANGEMENT

    preset = row.preset
    yield f"{preset.name}: {preset.about}"
    yield f"from {preset.source}"
    yield ""
    yield from _choice("predictor", preset.predictor, ())
    yield from _choice("arrangement", preset.arrangement, FORMS_BY_ARRANGEMENT)
    for stage, known in preset.stages().items():
        chosen = getattr(preset, stage)
        yield from _choice(stage, chosen, known)
        for number, param in known[chosen].items():
            yield _number(preset, number, param, number in row.given)
    yield ""
    more = f" --presets {file}" if file else ""
    command = f"foretoken serve{more} --policy {preset.name} --set preset.KEY=VALUE"
    yield f"{command} replaces a choice or number."


def _choice(stage: str, chosen: str, known: Iterable[str]) -> Iterator[str]:
    others = ", ".join(name for name in known if name != chosen)
    yield f"{stage:<18}{chosen:<16}{f'or {others}' if others else ''}".rstrip()


def _number(preset: "Preset", name: str, param: "Param", given: bool) -> str:
    value = param.shown(preset.params[name])
    bounds = " | ".join(param.names) if param.names else f"{param.least:.10g} to {param.most:.10g}"
    origin = "" if given else "default; "
    return f"{INDENT}{name:<16}{value:<16}{origin}{bounds}"
