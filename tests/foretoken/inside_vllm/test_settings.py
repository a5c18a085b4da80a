"""Settings of the scheduler inside vLLM, and what mistakes in them get."""

from pathlib import Path

import pytest

from foretoken.vllm.settings import VllmConfig, load_settings
from services.policies.preset import presets


def test_the_environment_replaces_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "vllm.toml"
    file.write_text(
        'policy = "mlfq"\nround_share = 0.1\n[sla_classes.fast]\nttft_s = 0.25\n'
        "[tenant_weights]\nbig = 3.0\n"
    )
    monkeypatch.setenv("FORETOKEN_VLLM_FILE", str(file))
    monkeypatch.setenv("FORETOKEN_VLLM_DEFAULT_SLA", "fast")
    monkeypatch.setenv("FORETOKEN_POLICY", "alise")
    settings = load_settings()
    assert settings.chosen().name == "alise"
    assert settings.round_share == 0.1
    assert settings.classes()["fast"].ttft_s == 0.25
    assert settings.tenant_weights == {"big": 3.0}


@pytest.mark.parametrize("name", [n for n, p in presets().items() if p.arrangement == "continuous"])
def test_every_continuous_policy_drops_the_kv_of_paused_requests(name: str) -> None:
    assert VllmConfig(policy=name).chosen().residency == "drop"


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        pytest.param({"FORETOKEN_POLICY": "magnus"}, "magnus serves static batches", id="static"),
        pytest.param({"FORETOKEN_POLICY": "alize"}, "did you mean alise", id="policy"),
        pytest.param({"FORETOKEN_VLLM_POLICI": "alise"}, "did you mean policy", id="key"),
        pytest.param(
            {"FORETOKEN_VLLM_PRESET": '{"residency": "swap"}'}, "always drop", id="residency"
        ),
        pytest.param({"FORETOKEN_VLLM_ROUND_SHARE": "0"}, "vllm.round_share", id="number"),
        pytest.param({"FORETOKEN_VLLM_PREDICTOR": "oracle"}, "vllm.predictor", id="predictor"),
        pytest.param(
            {"FORETOKEN_VLLM_PREDICTOR": "max", "FORETOKEN_VLLM_PREDICTOR_ADDRESS": "h:1"},
            "leave one out",
            id="two predictors",
        ),
        pytest.param({"FORETOKEN_VLLM_DEFAULT_SLA": "gold"}, "known: interactive", id="class"),
        pytest.param({"FORETOKEN_VLLM_FILE": "/nowhere.toml"}, "cannot read", id="no file"),
        pytest.param({"FORETOKEN_VLLM_FILE": __file__}, "not valid TOML", id="no TOML"),
    ],
)
def test_a_mistake_gets_a_sentence(
    variables: dict[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=sentence):
        settings = load_settings()
        settings.chosen()
        settings.classes()


def test_an_unknown_key_of_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "vllm.toml"
    file.write_text('polici = "mlfq"\n')
    monkeypatch.setenv("FORETOKEN_VLLM_FILE", str(file))
    with pytest.raises(ValueError, match="did you mean policy"):
        load_settings()
