"""The environment of every container holds valid settings that its process reads."""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from services.batcher.config import BatcherConfig
from services.estimator.config import EstimatorConfig
from services.policies.preset import DEFAULT, presets
from services.predictor.config import PredictorConfig
from services.runtime.config import ENV_PREFIX, Settings, check_environment, load
from services.runtime.main import ServedSettings
from services.runtime.network.identity import TlsConfig
from services.runtime.outcomelog.config import LogConfig
from services.runtime.telemetry.logs import LoggingConfig
from services.runtime.telemetry.tracing import TracingConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from services.worker.emulation.config import EmulationConfig
from tests.kubernetes.resolved import (
    FLEETS,
    OVERLAYS,
    ROOT,
    Object,
    container,
    from_config_maps,
    name,
    ours,
    pod,
    ports,
    program,
    settings,
    workloads,
)

# The section of each process, and the others that it reads.
SECTIONS: Mapping[str, type[ServedSettings]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "predictor": PredictorConfig,
    "estimator": EstimatorConfig,
    "batcher": BatcherConfig,
}
OTHERS: Mapping[str, tuple[type[Settings], ...]] = {
    "worker": (EmulationConfig,),
    "predictor": (LogConfig,),
}
COMMON = (TracingConfig, LoggingConfig, TlsConfig)


def read_by(service: str) -> tuple[type[Settings], ...]:
    return (SECTIONS[service], *OTHERS.get(service, ()), *COMMON)


@pytest.fixture
def workload(overlay: str, service: str) -> Object:
    [found] = [each for each in ours(overlay) if program(each) == service]
    return found


@pytest.fixture
def own(
    overlay: str, workload: Object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> ServedSettings:
    """The settings of the container's process. Loads every section that it reads."""
    for key in [each for each in os.environ if each.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(key)
    (tmp_path / "keys.txt").touch()  # the file of the Secret
    for key, value in settings(overlay, workload).items():
        monkeypatch.setenv(key, value.replace("/keys/", f"{tmp_path}/"))
    check_environment()
    for section in read_by(program(workload)):
        load(section)
    return load(SECTIONS[program(workload)])


@pytest.mark.parametrize("overlay", FLEETS)
@pytest.mark.parametrize("service", SECTIONS)
class TestEveryContainer:
    def test_listens_on_its_ports_on_all_addresses(self, own: ServedSettings, workload: Object):
        host, _, port = own.address.rpartition(":")
        assert (host, int(port)) == ("0.0.0.0", ports(workload)["grpc"])
        assert own.metrics_port == ports(workload)["metrics"]
        assert own.metrics_host == "0.0.0.0"

    def test_drains_within_the_grace_period(self, own: ServedSettings, workload: Object):
        hook = container(workload).get("lifecycle", {}).get("preStop", {})
        pause_s = hook.get("sleep", {}).get("seconds", 0)
        assert pause_s + own.drain_s < pod(workload)["spec"]["terminationGracePeriodSeconds"]

    def test_describes_the_process_by_the_command(self, own: ServedSettings, workload: Object):
        assert own.section == program(workload) == name(workload)


@pytest.mark.parametrize("overlay", FLEETS)
def test_every_service_is_deployed_once(overlay: str):
    assert sorted(map(program, ours(overlay))) == sorted(SECTIONS)


@pytest.mark.parametrize("overlay", FLEETS)
def test_every_variable_of_a_config_map_is_read_by_a_process(overlay: str):
    given, read = set(), set()
    for each in ours(overlay):
        names = set(from_config_maps(overlay, each))
        given |= names
        for section in read_by(program(each)):
            prefix = f"{ENV_PREFIX}{section.section}_".upper()
            read |= {key for key in names if key.startswith(prefix)}
    assert given == read


@pytest.mark.parametrize("overlay", FLEETS)
def test_gateways_and_workers_have_the_same_model(overlay: str):
    by_program = {program(each): settings(overlay, each) for each in ours(overlay)}
    gateway, worker = by_program["gateway"], by_program["worker"]
    assert gateway["FORETOKEN_GATEWAY_MODEL"] == worker["FORETOKEN_WORKER_MODEL"]


def test_predictor_is_the_one_of_the_scheduler_s_preset():
    by_program = {program(each): settings("one-node", each) for each in ours("one-node")}
    preset = presets()[by_program["scheduler"].get("FORETOKEN_SCHEDULER_POLICY", DEFAULT)]
    assert by_program["predictor"]["FORETOKEN_PREDICTOR_MODEL"] == preset.predictor


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_have_versions(overlay: str):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {container(each)["image"] for each in workloads(overlay)}
    assert {each.rpartition(":")[2] for each in images if "redis" not in each} == {version}
    assert all(re.fullmatch(r"redis:\d+\.\d+\.\d+-alpine", e) for e in images if "redis" in e)


def test_pods_run_as_the_user_of_the_image():
    [user] = re.findall(r"useradd .*--uid (\d+)", (ROOT / "deploy/Dockerfile").read_text())
    for overlay in OVERLAYS:
        for each in workloads(overlay):
            assert pod(each)["spec"]["securityContext"]["runAsUser"] == int(user)
