"""Virtual environments of users' clients, one a group of those that get along, under
`.venv-clients`: `python -m tests.clients.environments` makes what is missing or out of date.

What a group installs is `requirements/GROUP.txt`, every package at one version, and so without
resolving anything; `--lock` makes these files anew from `requirements/GROUP.in`. A stamp says of
which requirements an environment was made. Packages too large to have twice are borrowed from the
project's own environment.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
HOME = Path(__file__).parents[2] / ".venv-clients"
REQUIREMENTS = HERE / "requirements"
NODE_FILES = ("package.json", "package-lock.json")
AT_ONCE = 2  # installing is half waiting for the network, half unpacking
LEAST_FREE_GIB = 8.0


@dataclass(frozen=True)
class Group:
    """Clients in one environment. `borrowed` are distributions of this interpreter's environment
    that are lent to it."""

    name: str
    borrowed: tuple[str, ...] = ()


GROUPS = {
    group.name: group
    for group in (
        Group("openai"),
        Group("litellm"),
        Group("locust"),
        Group("measure", borrowed=("torch", "triton")),
    )
}


class NoRoom(Exception):
    """Not enough disk for what is missing; the text says so."""


def python_of(group: str) -> Path:
    """The interpreter of a group's environment, whether it is there or not."""
    return HOME / group / "bin" / "python"


def node_home() -> Path:
    """Where node finds the packages of `package.json`."""
    return HOME / "node"


def current(name: str) -> bool:
    """Whether the environment is made of what is required now."""
    stamp = HOME / name / ".made-of"
    return stamp.exists() and stamp.read_text() == _wanted(name)


def _wanted(name: str) -> str:
    files = [HERE / "node" / each for each in NODE_FILES] if name == "node" else [_pins(name)]
    content = b"".join(each.read_bytes() for each in files)
    return f"{sys.version_info[:2]} {hashlib.sha256(content).hexdigest()}\n"


def _pins(group: str) -> Path:
    return REQUIREMENTS / f"{group}.txt"


def free_gib() -> float:
    """What the disk has left where environments are made."""
    return shutil.disk_usage(HOME if HOME.exists() else HOME.parent).free / 2**30


def check_room() -> None:
    """Raises NoRoom where environments should not be made."""
    if (free := free_gib()) < LEAST_FREE_GIB:
        raise NoRoom(f"{free:.1f} GiB of disk are free; clients need {LEAST_FREE_GIB:g} to install")


def make(group: Group) -> None:
    """An environment from nothing: what is there is removed. Raises CalledProcessError."""
    folder = HOME / group.name
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in group.borrowed:
        _lend(name, packages)
    _pip(group.name, "install", "--no-deps", "--requirement", str(_pins(group.name)))
    (folder / ".made-of").write_text(_wanted(group.name))


def make_node() -> None:
    """The packages of `node/package.json`, as its lock file has them."""
    folder = HOME / "node"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in NODE_FILES:
        shutil.copy(HERE / "node" / name, folder)
    _run("npm", "ci", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts")
    (folder / ".made-of").write_text(_wanted("node"))


def _lend(name: str, packages: Path) -> None:
    """Links to all of a distribution's files in another environment's packages."""
    found = importlib.metadata.distribution(name)
    home = Path(str(found.locate_file("")))
    for top in sorted({each.parts[0] for each in found.files or ()} - {"..", "__pycache__"}):
        (packages / top).symlink_to(home / top)


def _pip(group: str, *arguments: str) -> str:
    return _run(str(python_of(group)), "-m", "pip", *arguments, "--quiet")


def _run(*command: str) -> str:
    """What the command says; raises CalledProcessError after telling what it complained of."""
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    done.check_returncode()
    return done.stdout


def _environment() -> dict[str, str]:
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "NPM_CONFIG_UPDATE_NOTIFIER": "false"}
    return {**os.environ, **quiet}


def lock(group: Group) -> None:
    """Writes a group's pins: all that pip would install for `GROUP.in` into an empty environment,
    but for what is borrowed. `GROUP.extra.txt`, where there is one, is added as it stands."""
    report = HOME / f"{group.name}.json"
    empty = HOME / f"{group.name}.empty"
    wanted = REQUIREMENTS / f"{group.name}.in"
    _run(sys.executable, "-m", "venv", str(empty))
    command = ["install", "--dry-run", "--requirement", str(wanted), "--report", str(report)]
    _run(str(empty / "bin" / "python"), "-m", "pip", *command, "--quiet")
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    pins = {_plain(each["name"]): each["version"] for each in found}
    for name in group.borrowed:
        pins.pop(name, None)
    lines = [f"{name}=={pins[name]}" for name in sorted(pins)]
    extra = REQUIREMENTS / f"{group.name}.extra.txt"
    head = f"# Made by `python -m tests.clients.environments --lock` of {wanted.name}.\n"
    _pins(group.name).write_text(
        head + "\n".join(lines) + "\n" + (extra.read_text() if extra.exists() else "")
    )
    report.unlink()
    shutil.rmtree(empty)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def missing(names: Iterable[str]) -> dict[str, Callable[[], None]]:
    """How to make each environment that is not as it should be."""
    makers: dict[str, Callable[[], None]] = {
        **{name: lambda group=group: make(group) for name, group in GROUPS.items()},  # type: ignore[misc]
        "node": make_node,
    }
    return {name: makers[name] for name in names if not current(name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*GROUPS, "node"])
    parser.add_argument("--lock", action="store_true", help="write requirements/*.txt anew")
    given = parser.parse_args()
    HOME.mkdir(exist_ok=True)
    if given.lock:
        for name in set(given.names) & set(GROUPS):
            lock(GROUPS[name])
        return 0
    wanted = missing(given.names)
    if "node" in wanted and not shutil.which("npm"):
        print("node's client is not installed, and its test will be skipped: npm is missing")
        del wanted["node"]
    try:
        if wanted:
            check_room()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for made in [pool.submit(maker) for maker in wanted.values()]:
                made.result()
    except NoRoom as why:
        print(f"clients are not installed, and their tests will be skipped: {why}")
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed; try again with the network up", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
