"""`gateway.models`: the config of each model, its part of the limits, and mistakes."""

import json

import pytest

from gateway.config import MAX_MODELS, GatewayConfig
from services.runtime.config import ConfigError, load

SMALL = {"model": "org/small", "scheduler_address": "127.0.0.1:1"}
LARGE = {
    "model": "org/large", "scheduler_address": "127.0.0.1:2,127.0.0.1:3",
    "chat_template": "large.jinja", "generation_config": "off",
}  # fmt: skip


def config_of(models: object, **settings: str) -> GatewayConfig:
    text = models if isinstance(models, str) else json.dumps(models)
    return load(GatewayConfig, {"models": text, **settings})


def test_one_model_is_its_own_config():
    config = load(GatewayConfig, {"model": "org/name"})
    assert config.per_model() == (config,)


def test_each_model_has_its_settings_and_those_of_the_section():
    config = config_of({"small": SMALL, "large": LARGE}, chat_template="ours.jinja")
    small, large = config.per_model()
    assert [each.model_name for each in (small, large)] == ["small", "large"]
    assert (small.model, small.scheduler_address) == ("org/small", "127.0.0.1:1")
    assert (small.chat_template, small.generation_config) == ("ours.jinja", "auto")
    assert (large.chat_template, large.generation_config) == ("large.jinja", "off")
    assert large.scheduler_address == "127.0.0.1:2,127.0.0.1:3"
    assert small.per_model() == (small,)
    assert large.metric_labels == {"model_name": "large"}


@pytest.mark.parametrize(("models", "sessions"), [(1, 10), (2, 5), (3, 4), (20, 1)])
def test_models_divide_live_requests_and_share_the_rest(models: int, sessions: int):
    entries = {
        f"m{at}": {"model": f"org/{at}", "scheduler_address": f"10.0.0.1:{at}"}
        for at in range(models)
    }
    parts = config_of(entries, max_sessions="10", max_queued="7").per_model()
    assert [each.max_sessions for each in parts] == [sessions] * models
    assert {each.verdicts_kept for each in parts} == {-(-4096 // models)}
    assert {each.max_queued for each in parts} == {7}  # of each scheduler
    assert {each.max_connections for each in parts} == {8192}  # of the process


def test_replicas_and_models_both_divide():
    config = config_of({"a": SMALL, "b": LARGE}, max_sessions="100", replicas="4")
    assert [each.max_sessions for each in config.own_share().per_model()] == [13, 13]


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ('{"a": {"model": "x", "scheduler_address": "h:1"}, "a": {}}', "'a' is given twice"),
        ("[1]", "gateway.models: Input should be a valid dictionary"),
        ({"a": "org/a"}, "gateway.models.a: Input should be a valid dictionary"),
        ({"a": {"model": "org/a"}}, "gateway.models.a: needs scheduler_address, the address of"),
        ({"a": SMALL | {"model": ""}}, "gateway.models.a: needs model, the folder or hub name"),
        (
            {"a": SMALL | {"max_sessions": 1}},
            "gateway.models.a: max_sessions is not a setting of one model; known: model, sched",
        ),
        ({"a": SMALL | {"generation_config": "on"}}, "gateway.models.a.generation_config: "),
        ({"a": SMALL, "b": SMALL}, "a and b have the same scheduler, 127.0.0.1:1: start one"),
        (
            {"a": LARGE, "b": SMALL | {"scheduler_address": "127.0.0.1:3"}},
            "a and b have the same scheduler, 127.0.0.1:3",
        ),
        ({"": SMALL}, "a model's name has 1 to 256 characters"),
        ({" a": SMALL}, "without blanks around them"),
        ({"a" * 257: SMALL}, "a model's name has 1 to 256 characters"),
        (
            {
                f"m{at}": SMALL | {"scheduler_address": f"h:{at}"}
                for at in range(MAX_MODELS + 1)
            },
            f"at most {MAX_MODELS} models, and there are {MAX_MODELS + 1}",
        ),
    ],
)  # fmt: skip
def test_mistake_is_one_sentence(models: object, complaint: str):
    with pytest.raises(ConfigError) as caught:
        config_of(models)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["model", "served_model_name", "scheduler_address"])
def test_setting_of_the_one_model_beside_models_is_refused(key: str):
    with pytest.raises(ConfigError, match=f"gateway: {key} is set beside models"):
        config_of({"a": SMALL}, **{key: "org/other:1"})
    assert config_of({"a": SMALL}, **{key: ""}).per_model()[0].model_name == "a"
