"""Reads the models of `foretoken serve [NAME=]MODEL…`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.commands.usage import UsageError


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A folder or hub name, and the name for clients; empty: that of the folder or the hub."""

    model: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model's folder and its name for clients; an empty name means the folder's name."""

    folder: str
    name: str = ""


def read_models(given: Sequence[str], option: str, served_name: str) -> Sequence[AskedModel]:
    """The models of the arguments or of `--model`; none: the demo model. Raises UsageError."""
    if option and given and list(given) != [option]:
        raise UsageError(f"two models are given, {given[0]} and --model {option}; give one")
    asked = [_split(text) for text in given or ([option] if option else [])]
    named = next((each for each in asked if each.name), None)
    if served_name and (len(asked) > 1 or named):
        raise UsageError(
            "--served-model-name is for one model without a name of its own; write NAME=MODEL for "
            "each model"
        )
    return asked


def read_adapters(given: Sequence[str], models: int) -> Mapping[str, str]:
    """The folders of `--lora-modules NAME=FOLDER`, by name. Raises UsageError."""
    if given and models > 1:
        raise UsageError("--lora-modules is for one model: start `foretoken serve` for each model")
    folders: dict[str, str] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not (name and folder):
            raise UsageError(f"--lora-modules: write NAME=FOLDER (got {text!r})")
        if not Path(folder).expanduser().is_dir():
            raise UsageError(f"--lora-modules: the folder does not exist (got {text!r})")
        if name in folders:
            raise UsageError(f"--lora-modules: two adapters have the name {name}")
        folders[name] = folder
    return folders


def check_several(cluster: str, gateways: int | None, backends: Sequence[str]) -> None:
    """Raises UsageError for an option that several models cannot have."""
    if gateways == 0:
        raise UsageError("several models need a gateway process: give --gateways 1 or more")
    for option, given in (("--cluster", cluster), ("--backend", backends)):
        if given:
            raise UsageError(f"{option} is for one model: start `foretoken serve` for each model")


def find_models(asked: Sequence[AskedModel], weights: bool) -> Sequence[FoundModel]:
    """The folder and the name of each model, downloaded if necessary; `weights`: whether they are
    loaded. Several have distinct names. Raises UsageError and ConfigError."""
    from foretoken.running.model import locate, require_servable

    found = []
    for each in asked:
        located = locate(each.model)
        require_servable(each.model, located.folder, weights)
        found.append(FoundModel(located.folder, each.name or located.name))
    if len(found) < 2:
        return found
    named = [
        FoundModel(each.folder, each.name or Path(each.folder).resolve().name) for each in found
    ]
    names = [each.name for each in named]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two models have the name {name}; write NAME=MODEL for one of them")
    return named


def _split(text: str) -> AskedModel:
    """`NAME=MODEL`, or a model alone; a folder with such a name is a folder."""
    name, equals, model = text.partition("=")
    if not equals or Path(text).is_dir():
        return AskedModel(text)
    if not (name and model):
        raise UsageError(f"write NAME=MODEL, or a model alone; got {text!r}")
    return AskedModel(model, name)
