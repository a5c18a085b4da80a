"""The documentation site builds without a warning, and its generated pages are current."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live import ROOT

README_LINES_MAX = 200


@pytest.mark.slow
def test_site_builds_strictly(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "<math" in (tmp_path / "algorithms.html").read_text()


@pytest.mark.slow
def test_strict_build_rejects_a_broken_link(tmp_path: Path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# Home\n\n[gone](gone.md)\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: broken\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1


@pytest.mark.slow
def test_generated_pages_are_current():
    """`python docs/generate.py` writes them."""
    script = (
        "import json, runpy; pages = runpy.run_path('docs/generate.py')['PAGES'];"
        "print(json.dumps({name: page() for name, page in pages.items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    generated = json.loads(done.stdout)
    assert generated.keys() == {"settings.md", "presets.md", "alerts.md"}
    for name, page in generated.items():
        assert (ROOT / "docs" / name).read_text() == page, name


def test_readme_has_a_bounded_length():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_relative_links_lead_to_files(page: str):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text())
    assert links or page == "CONTRIBUTING.md"
    for link in links:
        assert (ROOT / link).exists(), f"{page} links to {link}"


def test_code_map_names_existing_paths():
    text = (ROOT / "docs/architecture.md").read_text()
    paths = re.findall(
        r"`((?:services|gateway|protos|observability|simulator|lab|models|benchmarks|deploy|foretoken)"
        r"/[\w/.]*)`",
        text,
    )
    assert len(paths) >= 15
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("package", ["gateway", "services/policies", "services/worker"])
def test_code_map_names_existing_parts_of_a_package(package: str):
    text = (ROOT / "docs/architecture.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith(f"| `{package}/` |"))
    parts = re.findall(r"`([\w.]+/?)`", row.split("|")[2])
    assert len(parts) >= 5
    for part in parts:
        assert (ROOT / package / part).exists(), f"{package}/{part}"
