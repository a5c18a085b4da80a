"""Where a served model is: a folder, what the hub's cache holds, or the hub itself.

Found once, before any process is started: each of them would look for itself, and without a network
retry for long. What they all get is a folder.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from threading import Thread
from typing import TypeVar

from services.runtime.config import ConfigError

HUB_S = 4.0  # for the hub to answer; with its name to be looked up, some more
LIMIT_S = HUB_S + 1.0
READ = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
READ_OLD = ["*.json", "*.bin", "*.txt", "*.model", "*.jinja"]  # where there are no safetensors
WEIGHTS = (".safetensors", ".bin")

T = TypeVar("T")


@dataclass(frozen=True)
class Located:
    """A model's folder, and what clients call it; empty: as the folder is called."""

    folder: str
    name: str = ""


def locate(model: str) -> Located:
    """The model of that folder or hub name; downloads what isn't there.

    Raises ConfigError, one line, within seconds where there is neither folder nor hub.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return Located(str(path) if model.startswith("~") else model)
    if path.is_file():
        raise ConfigError(f"{model} is a file; a model is a folder, or a name on the hub")
    if not _could_be_hub_name(model):
        raise ConfigError(f"there is no folder {model}{_meant(path, ', ')}")
    folder = _cached(model) or _fetched(model, path)
    return Located(folder, model)


def _could_be_hub_name(model: str) -> bool:
    """`owner/name`, or one word."""
    return model.count("/") <= 1 and not model.startswith(("/", ".", "~")) and model[-1] != "/"


def _meant(path: Path, lead: str) -> str:
    """A folder beside with a similar name; empty where there is none."""
    try:
        beside = [each.name for each in path.parent.iterdir() if each.is_dir()]
    except OSError:
        return ""
    near = get_close_matches(path.name, beside, n=1)
    return f"{lead}did you mean {path.parent / near[0]}?" if near else ""


def _cached(model: str) -> str:
    """The folder of a snapshot that is whole; empty where there is none."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, local_files_only=True))
    except Exception:  # a name that is none, no such snapshot, …: then it isn't cached
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


def _fetched(model: str, path: Path) -> str:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    where = os.environ.get("HF_ENDPOINT", "the hub")
    try:
        told = _within(LIMIT_S, lambda: HfApi().model_info(model, timeout=HUB_S))
        names = [file.rfilename for file in told.siblings or ()]
        patterns = READ if any(name.endswith(".safetensors") for name in names) else READ_OLD
        return str(snapshot_download(model, allow_patterns=patterns))
    except GatedRepoError:
        raise ConfigError(
            f"{model} is gated: accept its terms on its page and set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ConfigError(
            f"there is no folder {model} here, and {where} has no model of that name; a private "
            f"one needs HF_TOKEN{_meant(path, '; ')}"
        ) from None
    except HfHubHTTPError as error:
        why = (str(error).strip().splitlines() or ["an error"])[0]
        raise ConfigError(f"{where} does not give {model}: {why}") from None
    except Exception as error:  # of whichever HTTP client the hub's library has
        if os.environ.get("HF_HUB_OFFLINE"):
            reach = "HF_HUB_OFFLINE keeps the hub away"
        else:
            reach = f"{where} cannot be reached ({_first_line(error)})"
        raise ConfigError(
            f"no folder {model} here, and {reach}; give a folder, or download the model where "
            f"there is a network{_meant(path, '; ')}"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _within(limit_s: float, work: Callable[[], T]) -> T:
    """Its result, or TimeoutError after the limit: looking up a name knows no limit of its own. The
    thread is left behind, and ends with the process."""
    found: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            failed.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return found[0]
