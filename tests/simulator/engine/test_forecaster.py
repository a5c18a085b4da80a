"""Predictors in virtual time: the named one answers alone, learns as served, and takes its time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from services.core import Request
from services.forecast import Forecast
from services.policies.preset import choose, presets
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import Extractor
from services.predictor.interface import Features, Prompt
from services.predictor.learning.schedule import FIRST_CHECK_S
from services.predictor.predictors import PREDICTORS, READS
from simulator import study
from simulator.engine.forecaster import FORECASTERS
from simulator.engine.prompt_forecaster import EXAMPLES, SERVED
from simulator.engine.settings import RunSettings
from simulator.engine.simulation import Simulation, simulate
from simulator.hardware.hardware import Hardware
from simulator.study import Point, run_points, vary
from simulator.workload.prompt_features import encode_prompts
from simulator.workload.workload import Workload
from tests.predictor.predictor_serving import HashEncoder
from tests.simulator.fixtures import BY_HAND, INSTANT, settings, workload

SHORT, LONG = "a short answer", "a very long answer"
ASKED = [Request(str(row), "model", 8, 256, 0.0) for row in (0, 1)]


class WideEncoder(HashEncoder):
    dim = 16  # as many values as Magnus' forest folds to


def prompted(count: int, gap_s: float = 0.2) -> Workload:
    """Every other prompt asks for a long answer. A made encoder tells both kinds apart."""
    texts = [LONG if row % 2 else SHORT for row in range(count)]
    features = Extractor(WideEncoder()).extract([Prompt("", text, 8) for text in texts])
    return Workload(
        "kinds",
        np.arange(count, dtype=np.float64) * gap_s,
        np.full(count, 8),
        np.array([150 if row % 2 else 10 for row in range(count)]),
        prompts=texts,
        features=features,
    )


def reading(predictor: str, preset: str = "srtf", **changes: object) -> RunSettings:
    return replace(settings(preset), predictor=predictor, **changes)  # type: ignore[arg-type]  # fields of any type


def test_every_predictor_that_a_preset_names_is_simulated():
    assert {preset.predictor for preset in presets().values()} <= set(FORECASTERS)
    assert set(FORECASTERS) == {*PREDICTORS, "given"}


def forecasts_of(simulation: Simulation, requests: Sequence[Request]) -> list[Forecast]:
    assert simulation._forecaster
    return simulation._forecaster.forecast(requests)


@pytest.mark.parametrize("name", sorted({*READS} - {"blend"}))
def test_trained_predictor_answers_alone_and_tells_prompts_apart(name: str):
    training, requests = prompted(160).hold_out(120)
    simulation = Simulation(reading(name, training=training), requests)
    forecasts = forecasts_of(simulation, ASKED)
    assert [forecast.source for forecast in forecasts] == [name, name]
    short, long = (forecast.mean() for forecast in forecasts)
    assert short < 60 < 100 < long
    assert simulation.run().records.finished.all()


@pytest.mark.parametrize(("pure", "source"), [(True, "max"), (False, "history")])
def test_predictor_without_a_fit_forecasts_nothing_or_as_served(pure: bool, source: str):
    """Pure, an unfitted model forecasts max_tokens; as served by default, history answers."""
    requests = prompted(20)
    simulation = Simulation(reading("ranker", pure=pure), requests)
    simulation.run()
    forecasts = forecasts_of(simulation, ASKED)
    assert {forecast.source for forecast in forecasts} == {source}
    if pure:
        assert [forecast.mean() for forecast in forecasts] == [256, 256]


@pytest.mark.slow
def test_predictor_learns_online_and_is_refitted():
    requests = prompted(400)
    simulation = Simulation(reading("words"), requests)
    simulation.run()
    short, long = (forecast.mean() for forecast in forecasts_of(simulation, ASKED))
    assert short < 40 < 100 < long


def test_models_are_refitted_when_the_served_ones_are():
    served = PredictorConfig()
    assert served.refit_interval_s == SERVED.interval_s
    assert served.refit_examples_min == SERVED.examples_min
    assert served.refit_new_min == SERVED.new_min
    assert served.refit_new_share == SERVED.new_share
    assert served.examples == EXAMPLES
    assert SERVED.check_interval_s(has_fitted=False) == FIRST_CHECK_S


def test_reading_a_prompt_delays_its_request_and_those_behind():
    """Two requests arrive at 0. Their prompts are read until 0.5 and 1.0. The first one's prefill
    of 8 tokens takes 1 + 0.8 s; the second one's begins when that step ends."""
    training, requests = prompted(66, 0.0).hold_out(64)
    timing = replace(INSTANT, encode_s=0.5)
    hardware = (Hardware("hand", BY_HAND, kv_tokens=1_600),)
    made = reading("ridge", "fcfs", training=training, timing=timing, hardware=hardware)
    records = simulate(made, requests).records
    assert records.first_s.tolist() == pytest.approx([2.3, 4.1])
    words = replace(made, predictor="words")  # read without the encoder
    assert simulate(words, requests).records.first_s.tolist() == pytest.approx([2.6, 2.6])


def test_training_on_lengths_alone_serves_history():
    training, requests = prompted(160).hold_out(120)
    simulation = Simulation(reading("history", training=training), requests)
    [forecast] = forecasts_of(simulation, ASKED[:1])
    assert forecast.truncated(256).points == (10, 150, 256)  # 256: the prior


def test_equal_seeds_give_equal_results_of_a_trained_net():
    training, requests = prompted(160).hold_out(120)
    runs = [simulate(reading("ranker", training=training), requests).records for _ in range(2)]
    assert np.array_equal(runs[0].last_s, runs[1].last_s)


def test_study_reads_prompts_once_for_all_points(monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []

    def count(asked: Workload) -> Sequence[Features]:
        read.append(asked.name)
        return prompted(len(asked)).features

    monkeypatch.setattr(study, "encode_prompts", count)
    training, requests = (replace(part, features=()) for part in prompted(150).hold_out(120))
    made = reading("ridge", training=training)
    points = [Point({}, replace(made, preset=choose(name)), requests) for name in ("srtf", "fcfs")]
    findings = run_points(vary(points, "rate", [5, 10]), 1)
    assert [finding.summary.finished for finding in findings] == [30] * 4
    assert read == ["kinds"] * 2  # the training requests and the others


def test_prompts_are_read_by_the_packaged_encoder():
    features = encode_prompts(replace(prompted(3), features=()))
    assert len(features) == 3
    assert np.array_equal(features[0].user_input, features[2].user_input)
    assert features[0].user_input.shape == (3, 384)


# Invalid input


@pytest.mark.parametrize("predictor", ["words", "ranker"])
def test_predictor_that_reads_prompts_is_refused_without_them(predictor: str):
    with pytest.raises(ValueError, match=rf"'{predictor}' reads .* prompt column .* history"):
        simulate(reading(predictor), workload([(0.0, 1, 1)]))


def test_too_few_training_requests_are_refused():
    training, requests = prompted(20).hold_out(10)
    with pytest.raises(ValueError, match="10 requests are too few to train on: hold out at least"):
        simulate(reading("ridge", training=training), requests)


@pytest.mark.parametrize("count", [0, 20])
def test_holding_out_none_or_all_requests_is_refused(count: int):
    with pytest.raises(ValueError, match="kinds has 20 requests: hold out 1 to 19"):
        prompted(20).hold_out(count)


def test_held_out_requests_are_the_first():
    first, rest = prompted(5, 2.0).hold_out(2)
    assert (len(first), len(first.prompts), len(rest.features)) == (2, 2, 3)
    assert rest.arrival_s.tolist() == [0.0, 2.0, 4.0]
    assert rest.prompts[0] == SHORT
