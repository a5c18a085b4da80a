"""`foretoken train ranker` and its parts, with encoders of two layers."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Sequence
from math import nan
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import BertConfig, BertModel

from foretoken.commands.offline.train import app
from lab.data.examples import prompt_of, query_of
from lab.data.rows import DataError, Row, Source, read_rows
from lab.data.split import is_validation
from lab.training.datasets import divide
from lab.training.early_stopping import BestWeights, TrainingOptions, TrainingReporter
from lab.training.finetune import TunedRanker, fine_tune
from lab.training.token_batches import (
    BATCH,
    TokenizedPrompts,
    batches,
    populations_of,
    read_texts,
)
from services.encoder.encoder import Encoder
from services.predictor.artefact import folder as artefact
from services.predictor.blend.content import ContentPredictor
from services.predictor.encoder.extract import Extractor
from services.predictor.interface import Options, Query
from services.predictor.learning.scorecard import tau_b
from services.predictor.predictors import build
from tests.live import ROOT, command, environment

KINDS = {"name": 10, "list": 60, "essay": 400}  # kind of request: answer length
THINGS = ["sea", "sun", "tree", "car", "cat", "king", "song", "ship"]
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *KINDS, *THINGS, "a", "an", "of", "the", "and", "it"]


def quiet(what: str, done: int, of: int) -> None:
    """Ignores progress."""


def rows_of(count: int, seed: int = 0) -> list[Row]:
    """Two thirds of the length follow from the kind of request."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        kind = rng.choice([*KINDS])
        things = " and ".join(rng.choices(THINGS, k=rng.randint(1, 3)))
        length = int(KINDS[kind] * rng.uniform(0.8, 1.2))
        prompt = f"{kind} {things} {i}"
        rows.append(Row("made", f"made-{i}", prompt, "m", "chat/all", 5, length))
    return rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "made.jsonl"
    fields = ("id", "prompt", "model", "task", "input_tokens", "output_tokens")
    records = [{field: getattr(row, field) for field in fields} for row in rows_of(500)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained encoder of two layers."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            initializer_range=0.2,
        )
    ).save_pretrained(folder)
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.save(str(folder / "tokenizer.json"))
    return folder


def in_process(*arguments: str | Path) -> None:
    whole = typer.Typer()
    whole.add_typer(app, name="train")
    threads = torch.get_num_threads()
    try:
        whole(["train", "ranker", *map(str, arguments), "--threads", "1"], standalone_mode=False)
    finally:
        torch.set_num_threads(threads)


def mistake(*arguments: str | Path) -> str:
    with pytest.raises(ValueError) as caught:
        in_process(*arguments)
    [message] = str(caught.value).splitlines()
    return message


def queries(name: str, source: Path, count: int = 40) -> list[Query]:
    extractor = Extractor(Encoder.load(name))
    rows = [row for row in read_rows(Source(source)) if is_validation(row.prompt)][:count]
    features = extractor.extract([prompt_of(row) for row in rows])
    return [query_of(row, f, 4096) for row, f in zip(rows, features, strict=True)]


# Command


def test_ranker_over_frozen_encoder_serves_before_first_outcome(
    data: Path, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "ranker"
    in_process("--data", data, "--out", out, "--encoder", tiny, "--epochs", "12")
    made = artefact.load(out)
    message = made.manifest
    assert (made.encoder, message.fine_tuned, message.seed) == (str(tiny), False, 0)
    [trained] = message.trained_on
    assert trained.data == "made" and 250 < trained.rows < 400
    assert message.metrics.tau is not None and message.metrics.tau > 0.5
    assert message.metrics.n == sum(is_validation(row.prompt) for row in rows_of(500))
    assert message.metrics.tau_by_data.keys() == {"made"}
    shown = capsys.readouterr()
    assert f"{out}: a ranker trained on {trained.rows} rows" in shown.out
    assert "ranker, net 4 of 4, epoch 1: tau" in shown.err
    asked = queries(made.encoder, data)
    for name in ("ranker", "blend"):
        predictor = build(name, Options())
        assert isinstance(predictor, ContentPredictor)
        predictor.adopt(made.refitted())
        forecasts = predictor.forecast(asked)
        assert {forecast.source for forecast in forecasts} == {name}
        assert len({forecast.mean() for forecast in forecasts}) > 3
        assert predictor.weights("anyone") == {"ranker": 1.0}


@pytest.mark.slow
def test_fine_tuned_encoder_is_served_from_artefact(data: Path, tiny: Path, tmp_path: Path):
    out = tmp_path / "LaBSE"  # the name must not restore LaBSE's pooling
    in_process("--data", data, "--out", out, "--encoder", tiny, "--fine-tune", "--epochs", "8")
    made = artefact.load(out)
    assert made.manifest.fine_tuned
    assert made.encoder == str(out / "encoder")
    assert {path.name for path in (out / "encoder").iterdir()} >= {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
    }
    modes = {path.stat().st_mode for path in out.rglob("*") if path.is_file()}
    assert len(modes) == 1  # the service may run as another user
    served, source = Encoder.load(made.encoder), Encoder.load(str(tiny))
    before, after = (e.encode(["essay of the sea"])[0, -1] for e in (source, served))
    assert float(before @ after) < 0.999
    assert made.manifest.metrics.tau is not None and made.manifest.metrics.tau > 0.5
    predictor = build("ranker", Options())
    assert isinstance(predictor, ContentPredictor)
    predictor.adopt(made.refitted())
    assert all(f.source == "ranker" for f in predictor.forecast(queries(made.encoder, data)))
    # `foretoken train ranker` and `foretoken evaluate` accept the folder as an encoder.
    again = tmp_path / "again"
    in_process("--data", data, "--out", again, "--encoder", out / "encoder", "--epochs", "1")
    assert artefact.load(again).encoder == str(out / "encoder")
    replaced = mistake("--data", data, "--out", out, "--encoder", out / "encoder")
    assert "would be replaced" in replaced


def test_training_is_deterministic_by_seed(data: Path, tiny: Path, tmp_path: Path):
    losses = []
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        out = tmp_path / name
        in_process("--data", data, "--out", out, "--encoder", tiny, "--epochs", "1", "--seed", seed)
        losses.append(artefact.load(out).manifest.metrics.pinball)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)  # float sums depend on the order
    assert losses[0] != pytest.approx(losses[2], rel=1e-2)


def test_training_replaces_only_artefacts(data: Path, tiny: Path, tmp_path: Path):
    out = tmp_path / "ranker"
    for seed in ("1", "2"):
        in_process("--data", data, "--out", out, "--encoder", tiny, "--epochs", "1", "--seed", seed)
        assert artefact.load(out).manifest.seed == int(seed)
        assert [path.name for path in tmp_path.iterdir()] == ["ranker"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "chapter").write_text("text")
    assert "exists and is not a ranker artefact" in mistake("--data", data, "--out", other)
    assert "exists and is not a ranker artefact" in mistake(
        "--data", data, "--out", other / "chapter"
    )
    assert (other / "chapter").read_text() == "text"


def test_invalid_options_give_one_sentence_and_write_nothing(
    data: Path, tiny: Path, tmp_path: Path
):
    out, few = tmp_path / "ranker", tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:50]))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    none = tmp_path / "none.jsonl"
    assert mistake("--data", none, "--out", out) == f"the file {none} does not exist"
    assert "has an answer's length" in mistake("--data", empty, "--out", out)
    assert "rows remain to train on" in mistake("--data", few, "--out", out)
    assert "cannot load encoder './none'" in mistake(
        "--data", data, "--out", out, "--encoder", "./none"
    )
    assert "there is no folder" in mistake("--data", data, "--out", tmp_path / "a" / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.jsonl", "few.jsonl"]


@pytest.mark.slow
def test_ctrl_c_writes_no_artefact(data: Path, tiny: Path, tmp_path: Path):
    out = tmp_path / "ranker"
    files = ["--data", str(data), "--out", str(out), "--encoder", str(tiny)]
    endless = ["--fine-tune", "--epochs", "1000", "--patience", "1000"]
    process = subprocess.Popen(
        command("train", "ranker", *files, *endless),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    try:
        assert process.stderr
        assert "tau" in process.stderr.readline()  # training has started
        assert list(tmp_path.iterdir())
        os.kill(process.pid, signal.SIGINT)
        _, message = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2
    assert message.splitlines()[-1] == f"foretoken: stopped; nothing was written to {out}"
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


# Parts


def test_divided_rows_share_no_prompt():
    rows = [*rows_of(2_000), *rows_of(2_000)]  # every prompt twice
    parts = divide(rows, 0, tenths=2)
    divided = [parts.train, parts.held, parts.judged]
    prompts = [{row.prompt for row in part} for part in divided]
    assert sum(map(len, divided)) == len(rows)
    assert sum(map(len, prompts)) == len(set.union(*prompts))
    assert all(is_validation(prompt) for prompt in prompts[2])
    assert not any(is_validation(prompt) for part in prompts[:2] for prompt in part)
    shares = [len(part) / len(rows) for part in divided]
    assert shares == pytest.approx([0.6, 0.15, 0.25], abs=0.03)
    fewer = divide(rows, 0)
    assert {row.prompt for row in fewer.held} < prompts[1]
    assert fewer.judged == parts.judged
    with pytest.raises(DataError, match="of 60 rows remain to train on"):
        divide(rows_of(60), 0)


def test_epoch_covers_all_prompts_in_full_batches():
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 60, 1_000)
    texts = TokenizedPrompts(
        [[]] * 1_000,
        [[7] * size for size in sizes],
        torch.zeros(1_000, dtype=torch.long),
        torch.ones(1_000),
    )
    epoch = list(batches(texts, np.random.default_rng(0)))
    assert {len(batch) for batch in epoch} == {BATCH}
    assert set(np.concatenate(epoch)) == set(range(1_000))
    assert np.mean([np.ptp(sizes[batch]) for batch in epoch]) < 12
    order = [int(sizes[batch].mean()) for batch in epoch]
    assert order != sorted(order)


@pytest.mark.slow
def test_fine_tuning_learns_order_and_keeps_best_weights(tiny: Path):
    rows, held = rows_of(600, seed=1), rows_of(150, seed=2)
    known = populations_of(rows)
    encoder = Encoder.load(str(tiny))
    texts, stop = (read_texts(some, known, encoder, quiet) for some in (rows, held))
    torch.manual_seed(0)
    ranker = TunedRanker(BertModel.from_pretrained(tiny), len(known))
    untrained = tau_b(ranker.eval().scores(stop), stop.lengths.numpy().astype(float))
    before = {key: value.clone() for key, value in ranker.encoder.state_dict().items()}
    lines: list[str] = []
    reported: list[tuple[int, int]] = []

    def progress(what: str, done: int, of: int) -> None:
        assert what.startswith("fine-tuning")
        reported.append((done, of))

    tau = fine_tune(
        ranker,
        texts,
        stop,
        TrainingOptions(epochs=8, patience=100),
        TrainingReporter(progress, lines.append),
    )
    assert tau > 0.4 > untrained + 0.2  # the kind alone gives 0.67
    assert any(
        not torch.equal(before[key], value) for key, value in ranker.encoder.state_dict().items()
    )
    tried = [float(line.rpartition(" ")[2]) for line in lines]
    assert tau == pytest.approx(max(tried), abs=5e-4)
    assert reported[-1] == (80, 80)


def test_patience_stops_fine_tuning(tiny: Path):
    rows = rows_of(128)
    chance = np.random.default_rng(0).permutation([row.output_tokens for row in rows])
    encoder = Encoder.load(str(tiny))
    texts = read_texts(rows, populations_of(rows), encoder, quiet)
    stop = TokenizedPrompts(
        texts.instructions, texts.user_inputs, texts.populations, torch.tensor(chance).float()
    )
    lines: list[str] = []
    ranker = TunedRanker(BertModel.from_pretrained(tiny), 1)
    report = TrainingReporter(quiet, lines.append)
    fine_tune(ranker, texts, stop, TrainingOptions(epochs=1_000, patience=2), report)
    assert 3 <= len(lines) < 200


def test_empty_text_does_not_change_score(tiny: Path):
    ranker = TunedRanker(BertModel.from_pretrained(tiny), 1).eval()
    one = TokenizedPrompts([[]], [[1, 5, 8, 2]], torch.tensor([0]), torch.ones(1))
    both = TokenizedPrompts(
        [[], [1, 4, 2]], [[1, 5, 8, 2], []], torch.tensor([0, 0]), torch.ones(2)
    )
    none = TokenizedPrompts([[]], [[]], torch.tensor([0]), torch.ones(1))
    assert ranker.scores(both)[0] == pytest.approx(ranker.scores(one)[0], abs=1e-5)
    assert ranker.scores(none)[0] == pytest.approx(float(ranker.head.bias.detach()))


@pytest.mark.parametrize(
    ("taus", "ends_at", "kept"),
    [
        ([0.1, 0.3, 0.2, 0.25], 3, 1),
        ([0.1, 0.2, 0.3], None, 2),
        ([0.1, 0.1, 0.1], 2, 0),
        ([nan, nan, nan], None, 2),
        ([nan, 0.2, nan, 0.1], 3, 1),
    ],
)
def test_best_weights_are_restored(taus: Sequence[float], ends_at: int | None, kept: int):
    module = nn.Linear(1, 1)
    best = BestWeights(module, patience=2)
    ended = None
    for trial, tau in enumerate(taus):
        nn.init.constant_(module.weight, trial)
        if best.offer(tau):
            ended = trial
            break
    best.restore()
    assert ended == ends_at
    assert module.weight.item() == kept
