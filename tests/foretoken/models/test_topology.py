"""The processes of several models under one supervisor."""

import pytest

from foretoken.running.children.supervisor import FALLBACKS
from foretoken.running.options import ServeOptions, model_sections, sections
from foretoken.running.topology import Shape, Topology, arrange
from gateway.config import GatewayConfig
from services.runtime.config import ConfigError, load
from tests.foretoken.test_topology import settings

FOLDER = "/run/x"


def test_every_model_has_all_options() -> None:
    options = ServeOptions(served_model_name="a", kv_tokens=512, more_models=[("b", "/models/b")])
    first, second = model_sections(options)
    assert first == sections(ServeOptions(served_model_name="a", kv_tokens=512))
    assert second["worker"] == {"model": "/models/b", "kv_tokens": "512"}
    assert second["gateway"]["served_model_name"] == "b"


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


def test_two_models_cannot_share_an_address() -> None:
    with pytest.raises(ConfigError, match="an address of --set is for one model, and there are"):
        two_models(Shape.SEPARATE, "scheduler.address=127.0.0.1:7")
