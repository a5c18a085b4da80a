"""The image has every package that the project installs."""

import re
import tomllib

from tests.live import ROOT


def test_dockerfile_copies_every_installed_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {pattern.removesuffix("*") for pattern in patterns}
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert packages <= set(copied)
