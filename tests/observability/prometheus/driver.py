"""A real Prometheus that scrapes one address and evaluates the committed rules twice a second."""

import json
import math
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from foretoken.running.ports import free_port
from observability.prometheus import build
from tests.live import wait_for

STARTED_S = 30.0
EVERY = "500ms"


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus, queried over its HTTP API."""

    url: str
    started_s: float

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of a response. Raises AssertionError with Prometheus' message."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as got:
                answer = json.load(got)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None
        assert answer["status"] == "success", answer
        return answer["data"]

    def samples(self, expr: str) -> list[float]:
        """The finite values of a query since the start, one per second."""
        data = self.get(
            "query_range",
            query=expr,
            start=f"{self.started_s:.3f}",
            end=f"{time.time():.3f}",
            step="1",
        )
        values = (float(value) for series in data["result"] for _, value in series["values"])
        return [value for value in values if math.isfinite(value)]

    def types(self) -> dict[str, str]:
        """The type of each family."""
        return {name: entries[0]["type"] for name, entries in self.get("metadata").items()}

    @property
    def is_scraping(self) -> bool:
        targets = self.get("targets")["activeTargets"]  # empty before the first discovery
        return [target["health"] for target in targets] == ["up"] * 2


@contextmanager
def scraping(program: str, target: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus over `target` (host:port), after its first scrape; stopped at the end."""
    for name in build.prometheus_files():
        shutil.copy(build.FOLDER / name, folder)
    port = free_port()
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(_configuration(target, f"127.0.0.1:{port}", list(build.prometheus_files())))
    )
    command = [
        program,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        running = Prometheus(f"http://127.0.0.1:{port}", time.time())
        try:
            wait_for(lambda: _is_ready(running, process, folder / "log"), STARTED_S)
            wait_for(lambda: running.is_scraping, STARTED_S)
            yield running
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def _configuration(target: str, own: str, rule_files: list[str]) -> dict[str, Any]:
    """`own`, the address of Prometheus, is a second target, without metrics of foretoken."""
    return {
        "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
        "rule_files": rule_files,
        "scrape_configs": [
            {"job_name": "foretoken-gateway", "static_configs": [{"targets": [target]}]},
            {"job_name": "foretoken-other", "static_configs": [{"targets": [own]}]},
        ],
    }


def _is_ready(running: Prometheus, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, f"prometheus ended: {log.read_text()}"
    try:
        with urllib.request.urlopen(f"{running.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
