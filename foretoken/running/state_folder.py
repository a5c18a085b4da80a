"""Holds the folder in which a server keeps the outcomes that its predictor learns from.

Each served model has a folder of its own, and a folder has one server at a time: the traffic of
another one would train its forecasts.
"""

import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from foretoken.running.options import Sections, predictor_sections
from gateway.config import GatewayConfig
from services.predictor.predictors import READS
from services.runtime.config import ConfigError, load
from services.runtime.outcomelog.config import LogConfig

log = logging.getLogger(__name__)

SERVERS = 64  # of one model at a time, which have folders without --state-dir
OUTCOMES, LOCK = "outcomes.sqlite", "lock"


class _InUse(Exception):
    """Another server holds the folder."""


@contextmanager
def keeping_outcomes(state_dir: str, models: Sequence[Sections]) -> Iterator[list[Sections]]:
    """Yields the sections of each model with its `log.path`, while the folders are held.

    They are in `state_dir`, by the served name; emulated answers have a folder of their own.
    Without `state_dir` they are in the user's state folder: a second server of a model has the next
    free folder, and outcomes stay in memory if none can be made. A predictor that reads no prompts
    keeps no outcomes, and a given `log.path` stays.
    Raises ConfigError for a `state_dir` that cannot be used.
    """
    with ExitStack() as held:
        yield [{**overrides, "log": _log(state_dir, overrides, held)} for overrides in models]


def find_outcomes(where: str) -> list[Path]:
    """The files of outcomes at `where`: a file, the folder of a model, or that of several servers;
    empty: the user's state folder. Raises ConfigError if there are none."""
    place = Path(where).expanduser() if where else _user_folder()
    known = place, place / OUTCOMES, *sorted(place.glob(f"*/{OUTCOMES}"))
    try:
        found = [path for path in known if path.is_file()]
    except OSError as error:
        raise ConfigError(f"cannot read {place}: {error.strerror}") from None
    if not found:
        raise ConfigError(
            f"there are no outcomes in {place}: name the file or URL of log.path, or the folder of "
            "--state-dir"
        )
    return found


def _log(state_dir: str, overrides: Sections, held: ExitStack) -> dict[str, str]:
    given = overrides["log"]
    is_given = "path" in load(LogConfig, given).model_fields_set
    if state_dir and is_given:
        raise ConfigError("log.path names the file of outcomes: leave out --state-dir")
    if is_given or predictor_sections(overrides, {})["predictor"]["model"] not in READS:
        return given
    made_up = "-emulated" if overrides["emulation"] else ""
    name = quote(load(GatewayConfig, overrides["gateway"]).model_name, safe="") + made_up
    folder: Path | None
    if state_dir:
        folder = _hold(Path(state_dir).expanduser() / name, held)
    else:
        folder = _hold_first_free(_user_folder() / name, held)
    return {"path": str(folder / OUTCOMES) if folder else "", **given}


def _user_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "foretoken"


def _hold(folder: Path, held: ExitStack) -> Path:
    try:
        held.enter_context(_locked(folder))
    except _InUse as use:
        raise ConfigError(
            f"--state-dir: {use} keeps its state in {folder}; give each server a folder of its own"
        ) from None
    except OSError as error:
        raise ConfigError(f"--state-dir: cannot use {folder}: {error.strerror}") from None
    return folder


def _hold_first_free(folder: Path, held: ExitStack) -> Path | None:
    for number in range(1, SERVERS + 1):
        place = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            held.enter_context(_locked(place))
        except _InUse as use:
            log.info("%s keeps its state in %s", use, place)
        except OSError as error:
            log.warning(
                "cannot keep what is learned in %s: %s; a restart forgets it. --state-dir names "
                "another folder", place, error.strerror
            )  # fmt: skip
            return None
        else:
            log.info("what is learned is kept in %s", place)
            return place
    log.warning("%d servers keep their state beside %s; this one keeps none", SERVERS, folder)
    return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes the folder, and locks it. Raises _InUse and OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise _InUse(f"process {lock.read() or 'unknown'}") from None
        with suppress(OSError):  # a full disk: the lock holds all the same
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        yield
