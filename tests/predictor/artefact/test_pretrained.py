"""A trained ranker serves from the first request."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from services.encoder.source import DEFAULT_NAME, find_folder
from services.predictor.artefact import folder as artefact
from services.predictor.artefact.manifest import (
    FEATURES,
    Manifest,
    Metrics,
    TrainedOn,
    weights_digest,
)
from services.predictor.artefact.tensors import Calibration
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import Extractor
from services.predictor.interface import Prompt, Query
from services.predictor.models.frame import Frame
from services.predictor.models.nets.recipes import ScoreModel, fit_ranker
from services.predictor.service import PredictorService
from tests.predictor.predictor_serving import (
    input_of,
    mean,
    predicting,
    real_encoder,
    requests,
)

YES = input_of("a", "Say yes or no: is 77 an even number?")
ESSAY = input_of("b", "Write a long essay about the history of the number 77.")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ranker artefact trained with the packaged encoder."""
    pairs = requests(200, seed=7)
    prompts = [Prompt("", i.text.user_input, i.prompt_tokens) for i, _ in pairs]
    features = Extractor(real_encoder()).extract(prompts)
    frame = Frame.from_queries([Query("demo", "", 12, 1_000, each) for each in features])
    lengths = np.array([float(outcome.output_tokens) for _, outcome in pairs])
    fitted = fit_ranker(frame, lengths, 0, lambda _: None)
    assert isinstance(fitted.model, ScoreModel)
    manifest = Manifest(
        created="2026-01-01T00:00:00+00:00",
        foretoken="0.1.0",
        encoder=DEFAULT_NAME,
        encoder_sha256=weights_digest(find_folder(DEFAULT_NAME)),
        features=FEATURES,
        fine_tuned=False,
        seed=0,
        trained_on=(TrainedOn(data="made", rows=200),),
        metrics=Metrics(n=0),
    )
    out = tmp_path_factory.mktemp("trained") / "ranker"
    with artefact.staged(out) as folder:
        calibration = Calibration(fitted.out_of_fold, frame.applications, lengths, len(lengths))
        artefact.write(folder, fitted.model, calibration, manifest)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ranker", "blend"])
async def test_trained_ranker_serves_before_first_outcome(trained: Path, model: str) -> None:
    async with predicting(model, encoder=real_encoder(), artefact=str(trained)) as running:
        short, long = await running.improved(YES, ESSAY)
    assert (short.source, long.source) == (model, model)
    assert mean(short) * 3 < mean(long)


async def test_broken_ranker_is_set_aside_and_serving_continues(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = shutil.copytree(trained, tmp_path / "ranker")
    weights = copy / "ranker.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    async with predicting("ranker", artefact=str(copy)) as running:
        (forecast,) = await running.forecast(YES)
    assert forecast.source == "history"
    assert (tmp_path / "ranker.corrupt-1").is_dir() and "serving continues without" in caplog.text


def test_predictor_without_ranker_rejects_artefact(trained: Path) -> None:
    config = PredictorConfig(model="forest", artefact=str(trained))
    with pytest.raises(ValueError, match="'forest' has no ranker"):
        PredictorService(config, CollectorRegistry())
