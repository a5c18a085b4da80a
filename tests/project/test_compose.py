"""deploy/compose.yaml is valid, and its services run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy/compose.yaml"
SCRAPES = ROOT / "observability/prometheus/prometheus.yml"
GRAFANA = ROOT / "deploy/grafana"
COLLECTOR = yaml.safe_load((ROOT / "deploy/collector.yaml").read_text())


def test_compose_follows_its_specification():
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(COMPOSE)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_check_rejects_a_mistake(tmp_path: Path):
    broken = tmp_path / "compose.yaml"
    broken.write_text(COMPOSE.read_text().replace("healthcheck:", "healthcheque:"))
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(broken)], capture_output=True, text=True)
    assert done.returncode == 1


@pytest.mark.slow
def test_compose_services_start_and_answer():
    driver = [
        sys.executable,
        str(ROOT / "tests/project/compose_driver.py"),
        "Reverse: red blue green",
    ]
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "--net", *driver],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    message = json.loads(done.stdout.splitlines()[-1])
    assert message["answer"]["choices"][0]["message"]["content"].strip() == "green blue red"
    assert set(message["exit_statuses"].values()) == {0}


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


def mounts() -> list[tuple[str, Path]]:
    """Service and path of each mount from the repository."""
    found = []
    for name, service in services().items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                found.append((name, (COMPOSE.parent / source).resolve()))
    return found


def test_every_mounted_file_exists():
    assert len(mounts()) >= 7
    for name, path in mounts():
        assert path.exists() and path.is_relative_to(ROOT), f"{name} mounts {path}"


def test_third_party_images_are_pinned_and_in_a_profile():
    others = {
        name: service
        for name, service in services().items()
        if not service["image"].startswith("foretoken:")
    }
    assert set(others) == {"prometheus", "grafana", "collector", "jaeger"}
    for name, service in others.items():
        tag = service["image"].partition(":")[2]
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), f"{name}: {service['image']}"
        assert service["profiles"] == ["observability"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_prometheus_scrapes_every_service():
    reported = set()
    for name, service in services().items():
        given = service.get("environment", {})
        ports = [given[key] for key in given if key.endswith("_METRICS_PORT")]
        ports += [given[key] for key in given if key == "FORETOKEN_GATEWAY_HTTP_PORT"]
        reported |= {f"{name}:{port}" for port in ports}
    port = COLLECTOR["exporters"]["prometheus"]["endpoint"].partition(":")[2]
    reported.add(f"collector:{port}")
    scraped = set()
    for job in yaml.safe_load(SCRAPES.read_text())["scrape_configs"]:
        ours = job["job_name"].startswith("foretoken-")  # as in ForetokenProcessDown
        assert ours or job["job_name"] == "collector"
        for static in job.get("static_configs", ()):
            scraped |= set(static["targets"])
        for found in job.get("dns_sd_configs", ()):
            scraped |= {f"{name}:{found['port']}" for name in found["names"]}
    assert scraped == reported


def test_grafana_finds_its_data_sources_and_dashboards():
    [provider] = yaml.safe_load((GRAFANA / "dashboards.yaml").read_text())["providers"]
    volumes = [volume.split(":") for volume in services()["grafana"]["volumes"]]
    [source] = [v[0] for v in volumes if v[1] == provider["options"]["path"]]
    assert list((COMPOSE.parent / source).resolve().glob("*.json"))
    sources = yaml.safe_load((GRAFANA / "datasources.yaml").read_text())["datasources"]
    assert {urlsplit(each["url"]).hostname for each in sources} <= set(services())
    interval = yaml.safe_load(SCRAPES.read_text())["global"]["scrape_interval"]
    assert sources[0]["jsonData"]["timeInterval"] == interval
