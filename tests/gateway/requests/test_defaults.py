"""Sampling defaults of generation_config.json apply to fields that a request leaves out."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.config import GatewayConfig
from gateway.faces.grpc.decode import decode_request
from gateway.requests.defaults import sampling_defaults
from gateway.requests.parser import Parser
from gateway.types.generation import ContextLimit, RequestArrival, Sampling
from protos.generated import common_pb2, gateway_pb2
from services.runtime.config import ConfigError
from tests.gateway.gateway_fakes import demo_folder, demo_text

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


def folder(path: Path, content: str) -> str:
    (path / "generation_config.json").write_text(content)
    return str(path)


def resolved(defaults: dict[str, float], **given: Any) -> Sampling:
    parser = Parser(GatewayConfig(model=demo_folder()), demo_text(), lambda: 7, defaults)
    sampling = common_pb2.Sampling(**given)
    request = gateway_pb2.GenerateRequest(prompt="hello", sampling=sampling)
    return parser.parse(
        decode_request(request), ContextLimit(10_000, "the cache"), RequestArrival(0.0)
    ).sampling


def test_request_fields_override_the_model_s_sampling_defaults(tmp_path):
    defaults = sampling_defaults(folder(tmp_path, json.dumps(QWEN)))
    assert defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    sampling = resolved(defaults)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.95)
    sampling = resolved(defaults, temperature=0.0, top_k=-1)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 0.95)


def test_openai_s_defaults_apply_without_generation_config(tmp_path):
    assert sampling_defaults(str(tmp_path)) == {}
    assert sampling_defaults("organisation/model") == {}
    assert sampling_defaults(demo_folder()) == {}
    sampling = resolved({})
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "generation_config.json cannot be read"),
        ("[1]", "is not a JSON object"),
        ('{"temperature": "hot"}', "temperature must be a number, not 'hot'"),
        ('{"top_p": true}', "top_p must be a number, not True"),
        ('{"temperature": -1}', "temperature must be between 0 and 2, not -1; correct it, or set"),
    ],
)
def test_invalid_generation_config_is_a_config_error(tmp_path, content, sentence):
    with pytest.raises(ConfigError) as caught:
        sampling_defaults(folder(tmp_path, content))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
