"""Which processes `foretoken serve` starts in each shape, and how they reach each other."""

import json

import pytest

from foretoken.running.options import ServeOptions, default_gateways, secrets, sections
from foretoken.running.topology import Shape, Topology, arrange
from services.runtime.config import ConfigError

FOLDER = "/run/x"


def topology(shape: Shape, workers: int = 1, gateways: int = 1, *sets: str) -> Topology:
    return arrange([sections(ServeOptions(sets=sets))], shape, workers, gateways, FOLDER)


def settings(made: Topology, section: str) -> list[dict[str, str]]:
    return [child.overrides[section] for child in made.children if child.section == section]


@pytest.mark.parametrize(("cores", "gateways"), [(1, 0), (2, 1), (8, 1), (15, 1), (16, 2), (64, 8)])
def test_default_is_a_gateway_per_8_cores(cores: int, gateways: int) -> None:
    assert default_gateways(cores) == gateways


@pytest.mark.parametrize(
    ("shape", "processes"),
    [
        (Shape.EMBEDDED, {"worker-0", "worker-1", "predictor"}),
        (
            Shape.SHARED,
            {"worker-0", "worker-1", "predictor", "scheduler", "gateway-0", "gateway-1"},
        ),
        (
            Shape.SEPARATE,
            {"worker-0", "worker-1", "predictor", "scheduler", "gateway-0", "gateway-1"}
            | {"batcher", "estimator"},
        ),
    ],
)  # fmt: skip
def test_each_shape_has_its_processes(shape: Shape, processes: set[str]) -> None:
    made = topology(shape, 2, 2)
    assert {child.name for child in made.children} == processes
    assert len(made.children) == len(processes)


@pytest.mark.parametrize("shape", Shape)
def test_every_process_knows_the_addresses_of_its_peers(shape: Shape) -> None:
    made = topology(shape, 2, 2)
    [model] = made.models
    assert {each["scheduler_address"] for each in settings(made, "worker")} == {model.scheduler}
    assert [each["address"] for each in settings(made, "predictor")] == [model.predictor]
    for scheduler in settings(made, "scheduler"):
        assert scheduler["address"] == model.scheduler
        assert scheduler["predictor_address"] == model.predictor
    for gateway in settings(made, "gateway"):
        assert gateway["scheduler_address"] == model.scheduler
    workers = [each["address"] for each in settings(made, "worker")]
    assert {*workers, model.predictor} <= set(made.metrics_peers)
    over_tcp = {address.startswith("127.0.0.1:") for address in made.metrics_peers}
    assert over_tcp == {shape is Shape.SEPARATE}


def test_a_gateway_includes_the_metrics_of_every_other_process() -> None:
    made = topology(Shape.SHARED, 1, 3)
    for child in made.children:
        if child.section == "gateway":
            given = child.overrides["gateway"]
            peers = set(json.loads(given["metrics_peers"]))
            own = f"unix:{given['socket']}"
            assert peers == {*made.metrics_peers, *made.gateways} - {own}
            assert (given["gateway_id"], given["replicas"]) == (child.name, "3")


def test_a_single_gateway_has_no_label_and_holds_its_ports() -> None:
    [given] = settings(topology(Shape.SHARED), "gateway")
    assert (given["gateway_id"], given["replicas"]) == ("", "1")


def test_scheduler_process_gets_the_estimators_settings() -> None:
    made = topology(Shape.SHARED, 1, 1, "estimator.window=99", "scheduler.max_queue=7")
    [scheduler] = [child for child in made.children if child.name == "scheduler"]
    assert scheduler.overrides["estimator"] == {"window": "99"}
    assert scheduler.overrides["scheduler"]["max_queue"] == "7"


def test_addresses_of_the_command_line_win() -> None:
    made = topology(Shape.SEPARATE, 1, 1, "scheduler.address=127.0.0.1:7", "predictor.nice=3")
    assert made.models[0].scheduler == "127.0.0.1:7"
    assert "127.0.0.1:7" in made.metrics_peers
    [gateway] = settings(made, "gateway")
    assert gateway["scheduler_address"] == "127.0.0.1:7"


@pytest.mark.parametrize("key", ["address", "gateway_id", "metrics_port"])
def test_several_gateways_refuse_a_setting_of_one(key: str) -> None:
    for gateways in (0, 1):
        topology(Shape.SHARED, 1, gateways, f"gateway.{key}=7")
    sentence = rf"gateway.{key} is for a single gateway, and there are 3: leave it out"
    with pytest.raises(ConfigError, match=sentence):
        topology(Shape.SHARED, 1, 3, f"gateway.{key}=7")


def test_gateways_are_asked_for_their_state_at_their_own_sockets() -> None:
    made = topology(Shape.SHARED, 1, 1, "gateway.socket=/elsewhere", "gateway.replicas=9")
    [given] = settings(made, "gateway")
    assert made.gateways == [f"unix:{given['socket']}"] and given["replicas"] == "1"


def test_a_mistake_in_a_childs_section_is_reported_before_it_starts() -> None:
    with pytest.raises(ConfigError, match=r"log\.pth"):
        topology(Shape.SHARED, 1, 1, "log.pth=x")


def test_each_backend_has_a_worker_that_knows_its_place() -> None:
    urls = ["http://a:1", "http://b:2"]
    options = ServeOptions(engine="openai", backends=urls, workers=2, backend_key="secret")
    made = arrange([sections(options)], Shape.EMBEDDED, 2, 0, FOLDER, options.engine)
    workers = [child for child in made.children if child.section == "worker"]
    assert {child.module for child in workers} == {"services.worker.backend"}
    assert [child.overrides["worker"]["local_rank"] for child in workers] == ["0", "1"]
    assert {child.overrides["backend"]["urls"] for child in workers} == {json.dumps(urls)}
    assert "secret" not in str(made)
    assert secrets(options) == {"FORETOKEN_BACKEND_API_KEY": "secret"}
    assert options.awaited_workers == 1
