"""Ranker artefacts: intact, broken, old and newer folders, and serving."""

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from lab.training import ranker
from lab.training.datasets import TrainingSet
from lab.training.early_stopping import TrainingOptions, TrainingReporter
from services.predictor.artefact import folder as artefact
from services.predictor.artefact.folder import Artefact, load, load_or_set_aside
from services.predictor.artefact.manifest import (
    FEATURES,
    INSIDE,
    ArtefactError,
    FutureArtefactError,
    Manifest,
    Metrics,
    OldArtefactError,
    TrainedOn,
    digest,
    weights_digest,
)
from services.predictor.artefact.pretrained import Rescaling, trained_member
from services.predictor.artefact.tensors import Calibration
from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.members import HistoryMember, Member
from services.predictor.interface import LAYERS, NUMBERS, Example, Features, Options, Query
from services.predictor.learning.scorecard import tau_b
from services.predictor.models.fitting import Fitted
from services.predictor.models.frame import Frame
from services.predictor.models.nets.recipes import ScoreModel, fit_ranker
from services.predictor.models.spread import mean
from services.predictor.predictors import build
from tests.runtime.outcomelog.outcome_rows import warnings

DIM = 8


def examples(count: int, seed: int, scale: float = 1.0) -> list[Example]:
    """Answer lengths follow the prompt's first coordinate with noise."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        states = rng.normal(size=(LAYERS, DIM)).astype(np.float32)
        length = scale * np.exp(4 + states[-1, 0] + 0.3 * rng.normal())
        words = np.unique(rng.integers(0, 50, 5)).astype(np.int32)
        numbers = np.ones(len(NUMBERS), np.float32)
        features = Features(np.zeros_like(states), states, words, numbers)
        made.append(Example(Query("m", "chat", 9, 4096, features), max(1, int(length))))
    return made


def columns(of: Sequence[Example]) -> tuple[Frame, np.ndarray]:
    lengths = np.array([float(example.output_tokens) for example in of])
    return Frame.from_queries([example.query for example in of]), lengths


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    frame, lengths = columns(examples(300, 0))
    return fit_ranker(frame, lengths, 0, lambda _: None)


@pytest.fixture(scope="module")
def written(fitted: Fitted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("written") / "ranker"
    save_to(out, fitted)
    return out


@pytest.fixture
def saved(written: Path, tmp_path: Path) -> Path:
    """An artefact that a test may damage."""
    shutil.copytree(written, tmp_path / "ranker")
    return tmp_path / "ranker"


def save_to(out: Path, fitted: Fitted, encoder: str = "some-encoder") -> None:
    frame, lengths = columns(examples(300, 0))
    assert isinstance(fitted.model, ScoreModel)
    with artefact.staged(out) as folder:
        if encoder == INSIDE:
            (folder / INSIDE).mkdir()
            (folder / INSIDE / "model.safetensors").write_bytes(b"weights")
        calibration = Calibration(fitted.out_of_fold, frame.applications, lengths, len(lengths))
        artefact.write(folder, fitted.model, calibration, manifest(encoder, folder / INSIDE))


def manifest(encoder: str, inside: Path) -> Manifest:
    return Manifest(
        created="2026-01-01T00:00:00+00:00",
        foretoken="0.1.0",
        encoder=encoder,
        encoder_sha256=weights_digest(inside),
        features=FEATURES,
        fine_tuned=encoder == INSIDE,
        seed=7,
        trained_on=(TrainedOn(data="made", rows=300),),
        metrics=Metrics(n=0),
    )


def test_artefact_round_trips(written: Path, fitted: Fitted):
    made = load(written)
    asked, _ = columns(examples(50, 1))
    np.testing.assert_allclose(made.model.spread(asked), fitted.model.spread(asked), rtol=1e-3)
    np.testing.assert_allclose(made.calibration.spread, fitted.out_of_fold, rtol=1e-6)
    assert (made.encoder, made.manifest.seed) == ("some-encoder", 7)
    assert {path.name for path in written.iterdir()} == {"manifest.json", "ranker.safetensors"}


def test_inner_encoder_is_loaded_from_artefact(fitted: Fitted, tmp_path: Path):
    out = tmp_path / "ranker"
    save_to(out, fitted, INSIDE)
    assert load(out).encoder == str(out / "encoder")
    (out / "encoder" / "model.safetensors").write_bytes(b"weigh")
    with pytest.raises(ArtefactError, match="its encoder/ is truncated or was changed"):
        load(out)
    shutil.rmtree(out / "encoder")
    with pytest.raises(ArtefactError, match="it has no encoder/"):
        load(out)


def test_encoder_version_mismatch_is_rejected(written: Path, tmp_path: Path):
    made = load(written)
    artefact.check_installed(made, tmp_path)  # also trained on an encoder without files
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ArtefactError, match="a different version of the encoder 'some-encoder'"):
        artefact.check_installed(made, tmp_path)


def test_training_without_held_out_prompts_equals_fit_ranker(fitted: Fitted):
    frame, lengths = columns(examples(300, 0))
    lines: list[str] = []
    report = TrainingReporter(lambda *_: None, lines.append)
    model, calibration = ranker.fit(TrainingSet(frame, lengths), None, TrainingOptions(), report)
    asked, _ = columns(examples(50, 1))
    np.testing.assert_allclose(model.spread(asked), fitted.model.spread(asked), rtol=1e-3)
    np.testing.assert_array_equal(calibration.spread, fitted.out_of_fold)
    assert lines == []


# Broken folders

Spoil = Callable[[Path], object]


def rewrite(folder: Path, **changes: object) -> None:
    message = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**message, **changes}))


def spoil_tensors(folder: Path, spoil: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors and updates their digest."""
    path = folder / "ranker.safetensors"
    tensors = load_file(path)
    spoil(tensors)
    path.write_bytes(save(tensors, {"model": "{}", "calibration": "{}"}))
    rewrite(folder, ranker_sha256=digest(path))


def cut(folder: Path) -> None:
    path = folder / "ranker.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip(folder: Path) -> None:
    path = folder / "ranker.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


def junk(folder: Path) -> None:
    path = folder / "ranker.safetensors"
    path.write_bytes(b"junk")
    rewrite(folder, ranker_sha256=digest(path))


CORRUPT: dict[str, tuple[Spoil, str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "it has no manifest.json"),
    "cut manifest": (lambda f: (f / "manifest.json").write_text('{"form'), "cannot be read"),
    "binary manifest": (lambda f: (f / "manifest.json").write_bytes(b"\xff\0"), "cannot be read"),
    "not an object": (lambda f: (f / "manifest.json").write_text("[]"), "does not have the format"),
    "another format": (
        lambda f: rewrite(f, format="other"),
        "does not have the format 'foretoken-ranker'",
    ),
    "version as text": (lambda f: rewrite(f, version="1"), "is broken: version"),
    "unknown field": (lambda f: rewrite(f, extra=1), "is broken: extra"),
    "wrong metrics": (lambda f: rewrite(f, metrics={"n": []}), "is broken: metrics.n"),
    "no ranker": (lambda f: (f / "ranker.safetensors").unlink(), "it has no ranker.safetensors"),
    "cut ranker": (cut, "is truncated or was changed"),
    "one bit": (flip, "is truncated or was changed"),
    "junk": (junk, "cannot be read"),
    "not a number": (
        lambda f: spoil_tensors(f, lambda t: t["scale.logs"].fill_(torch.nan)),
        "not finite",
    ),
    "another model": (lambda f: spoil_tensors(f, lambda t: t.popitem()), "holds a different model"),
}


@pytest.mark.parametrize(("spoil", "message"), CORRUPT.values(), ids=CORRUPT.keys())
def test_corrupt_artefact_is_set_aside_with_reason(
    saved: Path, spoil: Spoil, message: str, caplog: pytest.LogCaptureFixture
):
    spoil(saved)
    with pytest.raises(ArtefactError) as caught:
        load(saved)
    assert message in str(caught.value)
    assert f"foretoken train ranker --data FILE --out {saved}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert load_or_set_aside(saved) is None
    aside = saved.with_name("ranker.corrupt-1")
    assert aside.is_dir() and not saved.exists()
    [warning] = warnings(caplog)
    assert warning.startswith(f"{saved} was renamed to {aside}; ")
    assert message in warning


def test_newer_and_older_artefacts_are_set_aside(saved: Path, tmp_path: Path):
    past = tmp_path / "past"
    shutil.copytree(saved, past)
    rewrite(saved, version=2, format="foretoken-ranker", encoder=5, new="field")
    with pytest.raises(FutureArtefactError, match="has version 2, and this foretoken reads up to"):
        load(saved)
    assert load_or_set_aside(saved) is None
    assert (tmp_path / "ranker.future-1").is_dir()
    rewrite(past, features="fewer")
    with pytest.raises(OldArtefactError, match="trained on features that this"):
        load(past)
    assert load_or_set_aside(past) is None
    assert (tmp_path / "past.old-1").is_dir()


def test_each_broken_artefact_is_kept(written: Path, tmp_path: Path):
    path = tmp_path / "ranker"
    for number in (1, 2, 3):
        shutil.copytree(written, path)
        cut(path)
        assert load_or_set_aside(path) is None
        assert (tmp_path / f"ranker.corrupt-{number}").is_dir()
    shutil.copytree(written, path)
    assert isinstance(load_or_set_aside(path), Artefact)


def test_folder_that_is_no_artefact_is_left_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "sea.jpg").touch()
    for name in ("photos", "nothing"):
        assert load_or_set_aside(tmp_path / name) is None
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    photos, nothing = warnings(caplog)
    assert "photos is not a ranker artefact" in photos
    assert "there is no ranker artefact" in nothing


def test_artefact_that_cannot_be_renamed_is_ignored(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(self: Path, target: Path) -> Path:
        raise PermissionError(f"no renaming of {self} to {target}")

    cut(saved)
    monkeypatch.setattr(Path, "rename", refuse)
    assert load_or_set_aside(saved) is None
    assert saved.is_dir()
    [warning] = warnings(caplog)
    assert "cannot be renamed (no renaming" in warning


def test_failed_artefact_write_keeps_the_old_one(saved: Path, fitted: Fitted):
    before = (saved / "manifest.json").read_text()
    with pytest.raises(RuntimeError, match="the disk failed"), artefact.staged(saved) as folder:
        (folder / "manifest.json").write_text("half")
        raise RuntimeError("the disk failed")
    assert (saved / "manifest.json").read_text() == before
    assert [path.name for path in saved.parent.iterdir()] == ["ranker"]
    save_to(saved, fitted, INSIDE)
    assert load(saved).manifest.fine_tuned
    assert [path.name for path in saved.parent.iterdir()] == ["ranker"]


# Serving


@pytest.mark.parametrize("name", ["ranker", "blend"])
def test_artefact_forecasts_before_first_outcome(written: Path, name: str):
    predictor = build(name, Options())
    assert isinstance(predictor, ContentPredictor)
    predictor.adopt(load(written).refitted())
    asked = examples(200, 2)
    forecasts = predictor.forecast([example.query for example in asked])
    assert {forecast.source for forecast in forecasts} == {name}
    true = np.array([float(example.output_tokens) for example in asked])
    assert tau_b(np.array([forecast.mean() for forecast in forecasts]), true) > 0.5
    pairs = list(zip(forecasts, true, strict=True))
    assert 0.75 < np.mean([f.quantile(0.05) <= n <= f.quantile(0.95) for f, n in pairs]) <= 1
    assert predictor.learn(asked) == 200


def test_trained_member_keeps_order_and_relearns_lengths(written: Path):
    made = load(written)
    options = Options()
    members: dict[str, Member] = {
        "history": HistoryMember(options),
        "trained": trained_member(made.model),
    }
    predictor = ContentPredictor("blend", members, options)
    predictor.adopt(made.refitted("trained"))
    elsewhere, judged = examples(300, 3, scale=10), examples(200, 4, scale=10)
    asked, true = columns(judged)
    before = made.model.spread(asked)
    predictor.learn(elsewhere)
    predictor.fit()
    after = np.array([f.mean() for f in predictor.forecast([e.query for e in judged])])
    assert tau_b(mean(before), after) > 0.95
    assert np.median(mean(before) / true) < 0.3
    assert 0.7 < np.median(after / true) < 1.4
    assert predictor.weights("chat")["trained"] > 0.8


def test_rescaling_is_picklable(written: Path):
    frame, lengths = columns(examples(100, 5))
    rescaling = Rescaling(load(written).model.ensemble)
    other = pickle.loads(pickle.dumps(rescaling))
    ours, theirs = (
        fit(frame, lengths, 0, lambda _: None).out_of_fold for fit in (rescaling, other)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
