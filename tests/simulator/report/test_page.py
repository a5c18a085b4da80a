"""Reports of a study: a page that needs nothing else, and equal bytes for equal seeds."""

import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from services.core import Sla
from simulator.engine.settings import ObservationLimits
from simulator.report.page import write_page
from simulator.study import Finding, Point, run_points, vary
from simulator.study_report import write_reports
from tests.chromium import browsing
from tests.simulator.fixtures import random_workload, settings

ROOT = Path(__file__).parents[3]
NAME = "<script>alert('a & b')</script>"
SIMULATE = (sys.executable, "-m", "foretoken", "simulate")
PRESETS = ("fcfs", "past-future", "srtf")


class Tags(HTMLParser):
    """The elements of a page, and what they refer to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [
            value or "" for name, value in attrs if re.search("href|src|action|data$", name)
        ]


def points(name: str = "random") -> list[Point]:
    requests = replace(random_workload(4, 30, 40.0), name=name)
    return [
        Point(
            {},
            replace(
                settings(preset), sla=Sla("given", ttft_s=0.5), observe=ObservationLimits(64, 20)
            ),
            requests,
        )
        for preset in PRESETS
    ]


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    return run_points(points(), 1)


def page_of(folder: Path, findings: list[Finding], name: str = "random") -> str:
    page = folder / "page.html"
    write_reports(points(name), findings, "", None, page)
    return page.read_text("utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, findings: list[Finding]) -> str:
    """A page about a workload and presets with a name that would be markup."""
    named = [
        replace(each, summary=replace(each.summary, preset=f"{each.summary.preset}{NAME}"))
        for each in findings
    ]
    return page_of(tmp_path_factory.mktemp("page"), named, NAME)


def test_page_refers_to_nothing_outside_itself(page: str):
    tags = Tags(page)
    assert set(tags.tags).isdisjoint({"script", "link", "img", "iframe", "object", "base"})
    assert tags.tags.count("svg") == 4
    assert tags.references and all(target.startswith("#") for target in tags.references)
    assert all(target.startswith("#") for target in re.findall(r"url\(\s*['\"]?(.)", page))
    assert "@import" not in page and "://" not in page


def test_page_shows_settings_and_the_figures_of_every_preset(page: str, findings: list[Finding]):
    for text in (
        "30 requests on 1 × small",
        "TTFT 0.5 s",
        "predictor history",  # of fcfs, in place of the preset's max
        "watermark 0.95",
        "TTFT p99",
        'class="best"',
        f"{findings[0].summary.makespan_s:#.3g}",
    ):
        assert text in page
    for preset in PRESETS:
        assert unescape(page).count(f'<th scope="row">{preset}{NAME}</th>') == 3
        assert page.count(f'<th scope="row">{preset}</th>') == 1  # its policies


def test_page_escapes_names_in_text_and_pictures(page: str):
    assert "<script" not in page
    assert f"<h1>{NAME}: 30 requests" in unescape(page)


def test_sweep_report_has_a_picture_and_a_row_for_each_value(tmp_path: Path):
    made = [
        replace(point, settings=replace(point.settings, observe=None)) for point in points()[:2]
    ]
    swept = vary(made, "max_tokens", [8, 64])
    write_reports(swept, run_points(swept, 1), "max_tokens", tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "<td>8; 64</td>" in page  # among the settings
    assert page.count('<th scope="row">64</th>') == 3 * 2
    assert Tags(page).tags.count("svg") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["max_tokens.png", "page.html"]


def test_page_that_cannot_be_written_is_named(tmp_path: Path, findings: list[Finding]):
    rows = [(each.keys, each.summary) for each in findings]
    with pytest.raises(ValueError, match=r"^cannot write .*: Is a directory$"):
        write_page(tmp_path, [], rows, [])


@pytest.mark.slow
def test_equal_seeds_give_equal_bytes_in_two_processes(tmp_path: Path):
    processes = []
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        given = (
            "--workload d3 --rate 2 --requests 12 --hardware a100-80g-llama2-7b --preset foretoken "
            f"--predictor history --sla ttft=1s --seed 3 --plot {folder} --html {folder}/page.html"
        )
        command = [*SIMULATE, *given.split()]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    assert [process.wait(120) for process in processes] == [0, 0]
    one, two = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / seed).iterdir())}
        for seed in ("1", "2")
    )
    assert list(one) == ["calibration.png", "gantt.png", "latency.png", "memory.png", "page.html"]
    assert one == two


def test_package_data_includes_the_page():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-data"]["simulator.report"] == ["*.html"]


@pytest.mark.slow
async def test_page_in_a_browser_is_readable_in_light_and_dark_and_on_a_phone(
    tmp_path: Path, findings: list[Finding], chromium_program: str
):
    page_of(tmp_path, findings)
    async with browsing(chromium_program) as browser, browser.tab() as tab:
        grounds, axes = set(), set()
        for width, scheme in ((1_280, "light"), (1_280, "dark"), (390, "dark")):
            await tab.look(width, 900, scheme)
            await tab.open((tmp_path / "page.html").as_uri())
            assert await tab.value("document.documentElement.scrollWidth") == width
            grounds.add(await tab.value("getComputedStyle(document.body).backgroundColor"))
            axes.add(await tab.value("getComputedStyle(document.querySelector('svg')).fill"))
            await tab.shot(f"report-{width}-{scheme}")
        assert len(grounds) == len(axes) == 2
        assert "Goodput and throughput" in await tab.text("body")
        assert tab.complaints == []
        assert set(tab.asked) == {(tmp_path / "page.html").as_uri()}
