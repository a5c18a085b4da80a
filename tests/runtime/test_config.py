"""Configuration: precedence of sources, and one-line errors."""

import subprocess
import sys
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError, model_validator

from foretoken.vllm.settings import VllmConfig
from services.runtime.config import ConfigError, Settings, check_environment, load, parse_sets
from services.scheduler.config import SchedulerConfig


class Sample(Settings):
    section: ClassVar[str] = "batcher"

    address: str = "127.0.0.1:1"
    window: int = Field(default=10, gt=0)
    params: dict[str, float] = Field(default_factory=dict)


def test_overrides_beat_the_environment_beats_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(Sample).window == 10
    monkeypatch.setenv("FORETOKEN_BATCHER_WINDOW", "20")
    assert load(Sample).window == 20
    assert load(Sample, {"window": "30"}).window == 30
    assert load(Sample, {"params": '{"reserved": 0.1}'}).params == {"reserved": 0.1}


def test_variables_without_the_prefix_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADDRESS", "elsewhere:1")
    monkeypatch.setenv("WINDOW", "nonsense")
    assert load(Sample) == Sample()


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Sample().window = 5


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            {"windw": "5"},
            "unknown config key batcher.windw, did you mean window?; known: address, params, win",
        ),
        ({"window": "0"}, "batcher.window: Input should be greater than 0 (got '0')"),
        ({"window": "many"}, "batcher.window: Input should be a valid integer"),
        ({"params": "[1]"}, "batcher.params: Input should be a valid dictionary"),
        ({"params": "{reserved"}, "batcher.params"),
    ],
)
def test_wrong_value_is_a_one_line_error_naming_the_key(
    overrides: dict[str, str], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Sample, overrides)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_variable_of_a_section_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_BATCHER_WINDWO", "5")
    with pytest.raises(ConfigError, match=r"unknown config key batcher\.windwo, did you mean wind"):
        load(Sample)


def test_variable_without_a_section_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_BATCHERS_WINDOW", "5")
    with pytest.raises(ConfigError, match=r"FORETOKEN_BATCHERS_WINDOW .*did you mean batcher\?"):
        check_environment()


def test_sets_are_parsed_by_section() -> None:
    sets = ["batcher.window=5", "batcher.address=unix:/tmp/a=b.sock"]
    assert parse_sets(sets, ["batcher", "worker"]) == {
        "batcher": {"window": "5", "address": "unix:/tmp/a=b.sock"},
        "worker": {},
    }


@pytest.mark.parametrize("item", ["batcher.window", "window=5", "=5", "batcher.=5", ""])
def test_malformed_set_is_an_error(item: str) -> None:
    with pytest.raises(ConfigError, match=r"--set takes section\.key=value"):
        parse_sets([item], ["batcher"])


def test_set_of_an_unknown_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'batchr', did you mean batcher"):
        parse_sets(["batchr.window=5"], ["batcher", "worker"])


@pytest.mark.parametrize(
    ("service", "arguments", "line"),
    [
        (
            "predictor",
            ["--set", "predictor.model=psychic"],
            "known: blend, classify, forest, history, history-seeded, max",
        ),
        ("predictor", ["--set", "predictor.model=oracle"], "predictor.oracle_file: the predictor"),
        ("estimator", ["--set", "estimator.windw=3"], "did you mean window?"),
        ("batcher", ["--sets"], "usage: [--set section.key=value]..."),
    ],
)
def test_service_exits_with_one_line_on_a_config_error(
    service: str, arguments: list[str], line: str
) -> None:
    command = [sys.executable, "-m", f"services.{service}", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"foretoken {service}: ")
    assert line in ended.stderr
    assert ended.stderr.count("\n") == 1


class Secretive(Settings):
    section: ClassVar[str] = "gateway"
    secret: ClassVar[frozenset[str]] = frozenset(("api_keys",))

    api_keys: tuple[str, ...] = ()
    port: int = 0

    @model_validator(mode="after")
    def _check(self) -> "Secretive":
        if self.port == 7:
            raise ValueError("no such port")
        return self


@pytest.mark.parametrize("given", [{"api_keys": '["hidden", 5]'}, {"port": "7"}])
def test_errors_do_not_show_secrets(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Secretive, {"api_keys": '["hidden"]', **given})
    assert "hidden" not in str(caught.value) and "got" not in str(caught.value)


def test_short_environment_name_yields_to_the_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORETOKEN_API_KEYS", '["a"]')
    check_environment()
    assert load(Secretive).api_keys == ("a",)
    monkeypatch.setenv("FORETOKEN_API_KEY", '["b"]')
    assert load(Secretive).api_keys == ("b",)
    monkeypatch.setenv("FORETOKEN_GATEWAY_API_KEYS", '["c"]')
    assert load(Secretive).api_keys == ("c",)
    assert load(Secretive, {"api_keys": '["d"]'}).api_keys == ("d",)
    assert load(Sample).window


def test_a_policy_by_its_short_name_is_that_of_every_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FORETOKEN_POLICY", "alise")
    check_environment()
    assert load(SchedulerConfig).policy == "alise"
    assert load(VllmConfig).policy == "alise"
    monkeypatch.setenv("FORETOKEN_VLLM_POLICY", "mlfq")
    assert load(VllmConfig).policy == "mlfq"
    assert load(SchedulerConfig).policy == "alise"


def test_the_environment_replaces_the_defaults_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_BATCHER_WINDOW", "7")
    assert load(Sample, defaults={"window": 5}).window == 7
    monkeypatch.delenv("FORETOKEN_BATCHER_WINDOW")
    assert load(Sample, defaults={"window": 5}).window == 5
    with pytest.raises(ConfigError, match="did you mean window"):
        load(Sample, defaults={"windw": 5})
