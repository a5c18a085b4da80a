"""Which processes `foretoken serve` starts in each shape, and how they reach each other."""

import json

import pytest

from foretoken.running.children.supervisor import FALLBACKS
from foretoken.running.options import (
    ServeOptions,
    default_gateways,
    model_sections,
    outcome_log,
    secrets,
    sections,
)
from foretoken.running.topology import Shape, Topology, arrange
from gateway.config import GatewayConfig
from services.runtime.config import ConfigError, load

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


def two_models(shape: Shape, *sets: str) -> Topology:
    options = ServeOptions(served_model_name="small", more_models=[("large", FOLDER)], sets=sets)
    return arrange(model_sections(options), shape, 2, 1, FOLDER)


@pytest.mark.parametrize("shape", [Shape.SHARED, Shape.SEPARATE])
def test_each_of_two_models_has_its_own_processes(shape: Shape) -> None:
    made = two_models(shape)
    small, large = made.models
    addresses = [each.overrides[each.section]["address"] for each in made.children[:-1]]
    assert len(set(addresses)) == len(addresses)
    assert len({child.name for child in made.children}) == len(made.children)
    for model, ids in ((small, ["0", "1"]), (large, ["2", "3"])):
        by_section: dict[str, list[dict[str, str]]] = {}
        for child in model.children:
            by_section.setdefault(child.section, []).append(child.overrides[child.section])
            assert child.name.endswith(f" of {model.name}")
        workers, [scheduler] = by_section["worker"], by_section["scheduler"]
        assert [each["local_rank"] for each in workers] == ids  # the GPU of each
        assert {each["local_workers"] for each in workers} == {"4"}
        assert {each["scheduler_address"] for each in workers} == {model.scheduler}
        assert {each["served_model_name"] for each in workers} == {model.name}
        assert scheduler["address"] == model.scheduler
        assert scheduler["predictor_address"] == model.predictor
        labelled = {each["model_label"] for each in (scheduler, *by_section["predictor"])}
        assert labelled == {model.name}


def test_gateway_of_two_models_has_an_entry_for_each() -> None:
    made = two_models(Shape.SHARED, "gateway.max_sessions=10")
    small, large = made.models
    [given] = settings(made, "gateway")
    config = load(GatewayConfig, given)
    assert [(each.model_name, each.scheduler_address) for each in config.per_model()] == [
        ("small", small.scheduler), ("large", large.scheduler),
    ]  # fmt: skip
    assert [each.max_sessions for each in config.per_model()] == [5, 5]
    assert set(config.metrics_peers) == set(made.metrics_peers)


def test_a_lost_process_of_one_of_two_models_has_a_fallback() -> None:
    """The supervisor says what goes on without it."""
    for shape in (Shape.SHARED, Shape.SEPARATE):
        assert {child.section for child in two_models(shape).children} <= FALLBACKS.keys()


def test_two_models_cannot_share_a_name() -> None:
    with pytest.raises(ConfigError, match="served_model_name is for one model, and there are sev"):
        two_models(Shape.SHARED, "gateway.served_model_name=both")


def test_two_models_cannot_share_an_address_or_an_outcome_file() -> None:
    with pytest.raises(ConfigError, match="an address of --set is for one model, and there are"):
        two_models(Shape.SEPARATE, "scheduler.address=127.0.0.1:7")
    logs = {
        child.overrides["log"]["path"]
        for child in two_models(Shape.SHARED).children
        if child.section == "predictor"
    }
    assert [path.rpartition("/")[2] for path in sorted(logs)] == [
        "outcomes-large.sqlite", "outcomes-small.sqlite",
    ]  # fmt: skip
    alone = sections(ServeOptions())
    assert outcome_log(alone, "words")["path"].endswith("/outcomes.sqlite")


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
