"""The options of `foretoken serve` reach the config sections; a missing one overrides nothing."""

from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.running.options import ServeOptions, demo_model, secrets, sections
from foretoken.running.topology import Shape, arrange
from gateway.config import GatewayConfig
from services.runtime.config import ConfigError, check_environment, load
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from services.worker.emulation.config import EmulationConfig
from services.worker.emulation.serving import limits_of
from simulator.hardware.hardware_file import load_hardware


@pytest.mark.parametrize(
    ("options", "worker"),
    [
        (ServeOptions(), {}),
        (ServeOptions(kv_tokens=512), {"kv_tokens": "512"}),
        (ServeOptions(max_model_len=99), {"max_context_tokens": "99"}),
        (ServeOptions(dtype="float32", device="cpu"), {"dtype": "float32", "device": "cpu"}),
        (ServeOptions(tensor_parallel=2), {"tensor_parallel": "2"}),
        (ServeOptions(kv_dtype="int8"), {"kv_dtype": "int8"}),
        (ServeOptions(host_gib=0.5), {"host_gib": "0.5"}),
        (ServeOptions(host_gib=0.0), {"host_gib": "0.0"}),
        (ServeOptions(host_gib=2.0, sets=["worker.host_gib=1"]), {"host_gib": "1"}),
    ],
)
def test_serve_options_reach_the_worker(options: ServeOptions, worker: dict[str, str]) -> None:
    assert sections(options)["worker"] == {"model": demo_model(), **worker}
    assert set(worker) <= set(WorkerConfig.model_fields)


@pytest.mark.parametrize(
    ("engine", "setting", "needed"),
    [
        ("vllm", "emulation.sigma", "foretoken"),
        ("openai", "emulation.sigma", "foretoken"),
        ("foretoken", "backend.poll_s", "openai"),
        ("vllm", "backend.poll_s", "openai"),
    ],
)
def test_settings_that_only_other_engines_read_are_refused(
    engine: str, setting: str, needed: str
) -> None:
    sentence = f"^{setting} needs --engine {needed} [(]got --engine {engine}[)]$"
    with pytest.raises(ConfigError, match=sentence):
        sections(ServeOptions(engine=engine, sets=[f"{setting}=1"]))


def test_default_policy_is_left_to_the_scheduler() -> None:
    assert sections(ServeOptions())["scheduler"] == {}
    assert sections(ServeOptions(policy="fcfs"))["scheduler"] == {"policy": "fcfs"}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (ServeOptions(policy="alise"), "int8"),
        (ServeOptions(policy="alise", sets=["worker.swap_dtype=native"]), "native"),
        (ServeOptions(policy="alise", sets=["preset.residency=swap"]), None),
        (ServeOptions(policy="ltr"), None),
        (ServeOptions(policy="unknown"), None),  # reported later
    ],
)
def test_preset_decides_how_paused_kv_rests(options: ServeOptions, dtype: str | None) -> None:
    assert sections(options)["worker"].get("swap_dtype") == dtype


def test_scheduler_waits_for_the_forecasts_of_a_pure_predictor() -> None:
    given = sections(ServeOptions(sets=["predictor.pure=true", "scheduler.forecast_late_s=9"]))
    config = load(SchedulerConfig, given["scheduler"])
    assert config.forecast_patience_s == config.forecast_timeout_s == 30
    assert config.forecast_late_s == 9


def test_common_settings_reach_every_process() -> None:
    sets = ["tracing.endpoint=collector:4317", "logging.format=json"]
    topology = arrange([sections(ServeOptions(sets=sets))], Shape.SEPARATE, 2, 1, "/tmp")
    assert len(topology.children) == 7
    for child in topology.children:
        assert child.overrides["tracing"] == {"endpoint": "collector:4317"}
        assert child.overrides["logging"] == {"format": "json"}


def test_serve_options_reach_the_gateway(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch()
    options = ServeOptions(
        served_model_name="mine",
        chat_template="/t.jinja",
        api_key_file=str(keys),
        cors_origins="https://a, https://b",
        unknown_fields="refuse",
    )
    given = sections(options)["gateway"]
    config = load(GatewayConfig, given)
    assert (config.model_name, config.chat_template) == ("mine", "/t.jinja")
    assert (config.api_key_file, config.unknown_fields) == (str(keys), "refuse")
    assert config.cors_origins == ("https://a", "https://b")
    defaults = sections(ServeOptions())["gateway"]
    assert set(defaults) == {"model", "host", "http_port", "grpc_port"}


def test_log_level_reaches_every_process() -> None:
    overrides = sections(ServeOptions(log_level="debug", sets=["worker.log_level=ERROR"]))
    levels = {name: overrides[name].get("log_level") for name in overrides}
    services = ("gateway", "scheduler", "predictor", "batcher", "estimator")
    assert levels == {
        **dict.fromkeys(services, "DEBUG"),
        "worker": "ERROR",
        **dict.fromkeys(("emulation", "backend", "log", "tracing", "logging", "tls")),
    }
    for child in arrange([overrides], Shape.SEPARATE, 1, 1, "/tmp").children:
        assert {s.get("log_level") for s in child.overrides.values()} & {"DEBUG", "ERROR"}


def test_api_keys_are_not_in_the_process_list(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(api_keys=["sk-1", "sk-2"])
    assert "sk-1" not in str(arrange([sections(options)], Shape.SHARED, 1, 2, "/tmp"))
    for name, value in secrets(options).items():
        monkeypatch.setenv(name, value)
    check_environment()
    assert load(GatewayConfig, sections(options)["gateway"]).api_keys == ("sk-1", "sk-2")
    assert secrets(ServeOptions()) == {}


def test_emulated_hardware_reaches_worker_emulation_and_gateway() -> None:
    given = sections(
        ServeOptions(emulate="h200-llama3-8b", kv_tokens=4096, sets=["worker.max_running=9"])
    )
    hardware = load_hardware("h200-llama3-8b")
    worker = load(WorkerConfig, given["worker"])
    emulation = load(EmulationConfig, given["emulation"])
    limits = hardware.limits(prefix_sharing=True)
    ours = limits_of(worker, emulation, limits.eos_ids)
    assert ours == replace(limits, kv_blocks=256, max_running=9)
    assert replace(emulation.cost, source=hardware.cost.source) == hardware.cost
    assert given["gateway"]["system_fingerprint"] == "emulated-h200-llama3-8b"
    assert sections(ServeOptions())["emulation"] == {}


def test_emulated_kv_rests_as_the_preset_says() -> None:
    """ALISE's paused KV is in INT8: fewer bytes on the link, more tokens in host memory."""
    given = sections(ServeOptions(emulate="h100-llama3-8b", policy="alise"))
    emulation = load(EmulationConfig, given["emulation"])
    smaller = load_hardware("h100-llama3-8b").with_int8_at_rest()
    assert emulation.host_tokens == smaller.host_tokens
    assert emulation.cost.upload_token_s == smaller.cost.upload_token_s
    worker = load(WorkerConfig, given["worker"])
    assert not limits_of(worker, emulation, frozenset()).exact_swaps


def test_worker_processes_know_what_they_emulate() -> None:
    given = sections(ServeOptions(emulate="cpu2-demo", workers=2))
    children = arrange([given], Shape.SHARED, 2, 1, "/tmp").children
    workers = [child.overrides for child in children if child.section == "worker"]
    assert [each["emulation"]["hardware"] for each in workers] == ["cpu2-demo"] * 2
