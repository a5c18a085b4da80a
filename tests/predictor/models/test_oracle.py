"""The oracle predictor in the service: known lengths, and max_tokens for other prompts."""

import json
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from protos.generated import common_pb2, predictor_pb2
from services.predictor.config import PredictorConfig
from services.predictor.service import PredictorService
from services.runtime.config import ConfigError
from tests.predictor.predictor_serving import ended, input_of, predicting
from tests.reach import WAYS


def reported(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def row(prompt: str, tokens: int, **fields: object) -> dict[str, object]:
    return {"prompt": prompt, "output_tokens": tokens, **fields}


def message(forecast: common_pb2.Forecast) -> tuple[str, list[float]]:
    return forecast.source, list(forecast.points)


@pytest.mark.parametrize("way", WAYS)
async def test_oracle_forecasts_known_lengths_and_max_otherwise(way: str, tmp_path: Path) -> None:
    file = reported(
        tmp_path / "lengths.jsonl",
        row("count to ten", 31, id="ignored"),
        row("sort: b a", 5),
        row("sort: b a", 9, instruction="be long"),
        row("with system", 3, instruction=""),
        row("count to ten", 31),
        row("写一首诗 é", 4_000),
    )
    async with predicting("oracle", way=way, oracle_file=file) as running:
        forecasts = await running.forecast(
            input_of("1", "count to ten"),
            input_of("2", "count to ten", "be kind"),
            input_of("3", "sort: b a"),
            input_of("4", "sort: b a", "be long"),
            input_of("5", "with system", "be kind"),
            input_of("6", "写一首诗 é"),
            input_of("7", "count to ten "),
            predictor_pb2.ForecastInput(request_id="8", model="demo", max_tokens=77),
        )
        assert [message(forecast) for forecast in forecasts] == [
            ("oracle", [31]),
            ("oracle", [31]),
            ("oracle", [5]),
            ("oracle", [9]),
            ("max", [1_000]),
            ("oracle", [1_000]),
            ("max", [1_000]),
            ("max", [77]),
        ]
        assert not any(forecast.shared_key for forecast in forecasts)
        assert await running.observe(ended("1", 500)) == 0
        (again,) = await running.forecast(input_of("9", "count to ten"))
        assert message(again) == ("oracle", [31])
        assert running.value("forecasts_total", source="oracle") == 6


async def test_oracle_truncates_long_prompts(tmp_path: Path) -> None:
    file = reported(tmp_path / "lengths.jsonl", row("é" * 10_000, 7, instruction="ü" * 10_000))
    async with predicting("oracle", oracle_file=file, max_text_bytes=1_001) as running:
        forecasts = await running.forecast(
            input_of("1", "é" * 10_000, "ü" * 10_000),
            input_of("2", "é" * 500, "ü" * 500),
        )
    assert [message(forecast) for forecast in forecasts] == [("oracle", [7])] * 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"prompt": "a", "output_tokens": 3}\n{"prompt": "b"}', ":2: 'output_tokens' must be"),
        (b'{"prompt": "a", "output_tokens": 0}', ":1: 'output_tokens' must be a number, 1 to"),
        (b'{"prompt": "a", "output_tokens": true}', ":1: 'output_tokens' must be a number"),
        (b'{"prompt": "a", "output_tokens": 16777216}', "1 to 16777215"),
        (b'{"output_tokens": 3}', ":1: 'prompt' must be text"),
        (b'{"prompt": ["a"], "output_tokens": 3}', ":1: 'prompt' must be text"),
        (b'{"prompt": "a", "output_tokens": 3, "instruction": 1}', ":1: 'instruction' must be"),
        (b'\n\n{"prompt": "a", "output_tokens": 3', ":3: not JSON: "),
        (b'{"output_tokens": ' + b"9" * 5_000 + b"}", ":1: not JSON: "),
        (b"[" * 100_000, ":1: not JSON: "),
        (b'[["a", 3]]', ":1: a row must be a JSON object"),
        (
            b'{"prompt": "a", "output_tokens": 3}\n{"prompt": "a", "output_tokens": 4}',
            ":2: 4 output_tokens for the prompt of ",
        ),
        (b"\xff\xfe", " is not valid UTF-8"),
        (b"\n \n", " has no rows"),
    ],
)
def test_invalid_oracle_rows_prevent_start_with_message(
    content: bytes, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        PredictorService(
            PredictorConfig(model="oracle", oracle_file=str(path)), CollectorRegistry()
        )
    assert str(caught.value).startswith(f"predictor.oracle_file: {path}")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_oracle_needs_readable_file(tmp_path: Path) -> None:
    for file, sentence in (
        ("", "predictor.oracle_file: the predictor 'oracle' needs a file of JSON lines"),
        (str(tmp_path / "gone"), "gone cannot be read: No such file or directory"),
        (str(tmp_path), "cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            PredictorService(PredictorConfig(model="oracle", oracle_file=file), CollectorRegistry())


def test_only_oracle_opens_lengths_file() -> None:
    config = PredictorConfig(model="max", oracle_file="/no/such/file")
    PredictorService(config, CollectorRegistry())
