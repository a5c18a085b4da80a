"""requirements.lock, from which the image installs, fits the requirements of the project."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.live import ROOT

PINNED = re.compile(r"^([a-z0-9.-]+)==(\S+)(?: ; [^\\]+)? \\\n((?:    --hash=.*\n)+)", re.MULTILINE)
HASHES = re.compile(r"(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+")
LOCK = (ROOT / "requirements.lock").read_text()


def test_every_line_is_a_pinned_package_or_its_hash():
    entries = list(PINNED.finditer(LOCK))
    assert "".join(each.group() for each in entries) == LOCK
    for each in entries:
        assert re.fullmatch(r"(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", each.group(3)), (
            each.group(1)
        )


def test_requirements_of_the_project_are_locked_at_versions_that_they_admit():
    locked: dict[str, list[str]] = {}
    for each in PINNED.finditer(LOCK):
        locked.setdefault(canonicalize_name(each.group(1)), []).append(each.group(2))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"]:
        requirement = Requirement(line)
        versions = locked.get(canonicalize_name(requirement.name), [])
        assert versions, f"{requirement.name} is not in requirements.lock; run `make lock`"
        assert all(requirement.specifier.contains(each) for each in versions), requirement
