"""Finds the served model: a folder, a snapshot in the hub's cache, or a download.

The model is resolved once, before any process starts. Every process then receives a folder.
"""

import json
import os
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from foretoken.running.shutdown import run_in_daemon_thread
from services.runtime.config import ConfigError
from services.runtime.refusals.folder import (
    find_missing_file,
    find_model_fault,
    find_tokenizer_fault,
)

HUB_TIMEOUT_S = 4.0
LOOKUP_S = HUB_TIMEOUT_S + 1.0  # including the DNS lookup
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
FILES_WITHOUT_SAFETENSORS = ["*.json", "*.bin", "*.txt", "*.model", "*.jinja"]
WEIGHTS = (".safetensors", ".bin")


@dataclass(frozen=True)
class Located:
    """A model's folder and its name for clients; an empty name means the folder's name."""

    folder: str
    name: str = ""


def locate(model: str) -> Located:
    """Returns the model of a folder or hub name, downloading it if necessary.

    Raises ConfigError within seconds if there is no such folder and the hub is unreachable.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return Located(str(path) if model.startswith("~") else model)
    if path.is_file():
        if path.suffix == ".gguf":
            raise ConfigError(f"MODEL: {model} {find_missing_file([path.name])}")
        raise ConfigError(f"MODEL: {model} is a file; pass a model's folder or its name on the hub")
    if not _could_be_hub_name(model):
        raise ConfigError(
            f"MODEL: the folder {model} does not exist; pass a model's folder or its name on the "
            f"hub{_suggest(path)}"
        )
    folder = _cached(model) or _download(model, path)
    return Located(folder, model)


def require_servable(model: str, folder: str, weights: bool) -> None:
    """Raises ConfigError, with a sentence that says what to change, if the folder of `model` lacks
    what serving needs, as far as its files tell. Without `weights` it only needs a tokenizer."""
    path = Path(folder)
    try:
        fault = (find_model_fault(path) if weights else "") or find_tokenizer_fault(path)
    except OSError as error:
        fault = f"cannot be read: {error}"
    if fault:
        raise ConfigError(f"MODEL: {model} {fault}")


def _could_be_hub_name(model: str) -> bool:
    """Whether the text is `owner/name` or a single word."""
    return model.count("/") <= 1 and not model.startswith(("/", ".", "~")) and model[-1] != "/"


def _suggest(path: Path) -> str:
    """Returns a hint at a sibling folder with a similar name, or an empty string."""
    try:
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    near = get_close_matches(path.name, beside, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _cached(model: str) -> str:
    """Returns the folder of a complete snapshot in the cache, or an empty string."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, local_files_only=True))
    except Exception:  # an invalid name or no snapshot: not cached
        return ""
    files = {each.name for each in folder.iterdir()}
    indexed = [each for each in files if each.endswith(".index.json")]
    shards = {name for index in indexed for name in _shards(folder / index)}
    weights = any(each.endswith(WEIGHTS) for each in files)
    return str(folder) if "config.json" in files and weights and shards <= files else ""


def _shards(index: Path) -> set[str]:
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return {index.name + " is broken"}


def _download(model: str, path: Path) -> str:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    where = os.environ.get("HF_ENDPOINT", "the hub")
    try:
        # A DNS lookup itself has no timeout.
        lookup = run_in_daemon_thread(lambda: HfApi().model_info(model, timeout=HUB_TIMEOUT_S))
        info = lookup.result(LOOKUP_S)
        names = [file.rfilename for file in info.siblings or ()]
        if fault := find_missing_file(names):
            raise ConfigError(f"MODEL: {model} {fault}")
        patterns = (
            FILES
            if any(name.endswith(".safetensors") for name in names)
            else FILES_WITHOUT_SAFETENSORS
        )
        return str(snapshot_download(model, allow_patterns=patterns))
    except ConfigError:
        raise
    except GatedRepoError:
        raise ConfigError(
            f"MODEL: {model} is gated; accept its terms on the hub and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"MODEL: {model} is neither a folder nor a model on {where}; pass a model's folder or "
            f"its name on the hub (a private model needs HF_TOKEN){_suggest(path)}"
        ) from None
    except HfHubHTTPError as error:
        cause = (str(error).strip().splitlines() or ["an error"])[0]
        raise ConfigError(f"MODEL: {where} does not serve {model}: {cause}") from None
    except Exception as error:  # depends on the HTTP client of the hub's library
        if os.environ.get("HF_HUB_OFFLINE"):
            reach = "HF_HUB_OFFLINE is set"
        else:
            reach = f"{where} cannot be reached ({_first_line(error)})"
        raise ConfigError(
            f"MODEL: the folder {model} does not exist, and {reach}; pass a folder, or download "
            f"the model on a machine with a network{_suggest(path)}"
        ) from None


def _first_line(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {LOOKUP_S:g} s"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
