"""Virtual environments of third-party clients, one per group of compatible ones, in
`.venv-clients`: `python -m tests.clients.environments` creates those that are missing or outdated.

A group installs `requirements/GROUP.txt`, which pins every package, so that nothing is resolved;
`--lock` writes these files from `requirements/GROUP.in`. A stamp records the requirements of an
environment. Large packages are linked from the project's own environment.
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
PARALLEL = 2  # installing waits for the network half of the time
MIN_FREE_GIB = 12.0

SUITE = "schemas"  # the schemas of the JSON-Schema-Test-Suite, as the sdist of jsonschema has them
VLLM_VERSIONS = ("0.30", "0.31", "0.32")
TORCH = ("torch", "triton")
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")  # beside PyTorch's build for the CPU


@dataclass(frozen=True)
class Group:
    """Clients in one environment. `borrowed` are distributions that are linked from this
    interpreter's environment, `without` ones that are left out though others require them."""

    name: str
    borrowed: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


GROUPS = {
    group.name: group
    for group in (
        Group("openai"),
        Group("agents"),
        Group("anthropic"),
        Group("canitoolcall"),
        Group("envoy"),
        Group("litellm"),
        Group("locust"),
        Group("measure", borrowed=TORCH),
        *(Group(f"vllm-{version}", TORCH, UNLOADABLE) for version in VLLM_VERSIONS),
    )
}


class NoRoom(Exception):
    """The disk has too little space for the missing environments."""


def python_of(group: str) -> Path:
    """The path of the interpreter of a group's environment, which may not exist."""
    return HOME / group / "bin" / "python"


def node_home() -> Path:
    """The folder with the packages of `package.json`."""
    return HOME / "node"


def schema_suite() -> Path:
    """The folder of the JSON-Schema-Test-Suite, with a folder for each draft."""
    (tests,) = (HOME / SUITE).glob("jsonschema-*/json/tests")
    return tests


def current(name: str) -> bool:
    """Whether the environment has the current requirements."""
    stamp = HOME / name / ".made-of"
    return stamp.exists() and stamp.read_text() == _wanted(name)


def _wanted(name: str) -> str:
    files = [HERE / "node" / each for each in NODE_FILES] if name == "node" else [_pins(name)]
    content = b"".join(each.read_bytes() for each in files)
    return f"{sys.version_info[:2]} {hashlib.sha256(content).hexdigest()}\n"


def _pins(group: str) -> Path:
    return REQUIREMENTS / f"{group}.txt"


def free_gib() -> float:
    """Free space of the disk that holds the environments."""
    return shutil.disk_usage(HOME if HOME.exists() else HOME.parent).free / 2**30


def check_room() -> None:
    """Raises NoRoom if the disk has too little space."""
    if (free := free_gib()) < MIN_FREE_GIB:
        raise NoRoom(f"{free:.1f} GiB of disk are free; clients need {MIN_FREE_GIB:g} to install")


def make(group: Group) -> None:
    """Create a group's environment anew. Raises CalledProcessError."""
    folder = HOME / group.name
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(folder))
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in group.borrowed:
        _link(name, packages)
    _pip(group.name, "install", "--no-deps", "--requirement", str(_pins(group.name)))
    (folder / ".made-of").write_text(_wanted(group.name))


def make_node() -> None:
    """Install the packages of `node/package.json` at the versions of its lock file."""
    folder = HOME / "node"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in NODE_FILES:
        shutil.copy(HERE / "node" / name, folder)
    _run("npm", "ci", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts")
    (folder / ".made-of").write_text(_wanted("node"))


def make_suite() -> None:
    """Unpack the source distribution that has the JSON-Schema-Test-Suite."""
    folder = HOME / SUITE
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    sources = ("--no-deps", "--no-binary", "jsonschema", "--requirement", str(_pins(SUITE)))
    _run(sys.executable, "-m", "pip", "download", *sources, "--dest", str(folder), "--quiet")
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    (folder / ".made-of").write_text(_wanted(SUITE))


def _link(name: str, packages: Path) -> None:
    """Link a distribution's files into another environment's packages."""
    found = importlib.metadata.distribution(name)
    home = Path(str(found.locate_file("")))
    for top in sorted({each.parts[0] for each in found.files or ()} - {"..", "__pycache__"}):
        (packages / top).symlink_to(home / top)


def _pip(group: str, *arguments: str) -> str:
    return _run(str(python_of(group)), "-m", "pip", *arguments, "--quiet")


def _run(*command: str) -> str:
    """Return the command's stdout. Raises CalledProcessError after printing its output."""
    done = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    done.check_returncode()
    return done.stdout


def _environment() -> dict[str, str]:
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "NPM_CONFIG_UPDATE_NOTIFIER": "false"}
    return {**os.environ, **quiet}


def lock(group: Group) -> None:
    """Write a group's pins: what pip installs for `GROUP.in` into an empty environment, except
    borrowed distributions and those to be left out. The lines of `GROUP.extra.txt`, if it exists,
    are appended."""
    report = HOME / f"{group.name}.json"
    empty = HOME / f"{group.name}.empty"
    wanted = REQUIREMENTS / f"{group.name}.in"
    _run(sys.executable, "-m", "venv", str(empty))
    command = ["install", "--dry-run", "--requirement", str(wanted), "--report", str(report)]
    _run(str(empty / "bin" / "python"), "-m", "pip", *command, "--quiet")
    found = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    pins = {_plain(each["name"]): each["version"] for each in found}
    for name in (*group.borrowed, *group.without):
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
    """Return a function per missing or outdated environment that creates it."""
    makers: dict[str, Callable[[], None]] = {
        **{name: lambda group=group: make(group) for name, group in GROUPS.items()},  # type: ignore[misc]  # mypy infers no default
        "node": make_node,
        SUITE: make_suite,
    }
    return {name: makers[name] for name in names if not current(name)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*GROUPS, "node", SUITE])
    parser.add_argument("--lock", action="store_true", help="write requirements/*.txt")
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
        with ThreadPoolExecutor(PARALLEL) as pool:
            for made in [pool.submit(maker) for maker in wanted.values()]:
                made.result()
    except NoRoom as error:
        print(f"clients are not installed, and their tests will be skipped: {error}")
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed; check the network and run it again", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
