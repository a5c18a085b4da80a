"""Fine-tunes an encoder and writes a folder that `Encoder.load` accepts."""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from lab.training.datasets import RowSplit
from lab.training.early_stopping import TrainingOptions, TrainingReporter
from lab.training.finetune import TunedRanker, fine_tune
from lab.training.token_batches import populations_of, read_texts
from services.encoder.encoder import Encoder
from services.encoder.source import find_folder, without_progress_bar

_TOKENIZER = ("tokenizer*.json", "special_tokens_map.json", "vocab.txt")
_POOLING = "1_Pooling"


def tune_encoder(
    name: str,
    encoder: Encoder,
    parts: RowSplit,
    to: Path,
    options: TrainingOptions,
    report: TrainingReporter,
) -> None:
    """Fine-tunes the named encoder to rank prompts and writes it to `to`. `encoder` is the same
    encoder as it is served, so that training reads the same tokens as serving."""
    known = populations_of(parts.train)
    train_on, held = (
        read_texts(rows, known, encoder, report.progress) for rows in (parts.train, parts.held)
    )
    torch.manual_seed(options.seed)
    source = find_folder(name)
    ranker = TunedRanker(_load(source), len(known), options.layers)
    fine_tune(ranker, train_on, held, options, report)
    _save(ranker.encoder, source, to)


def _load(folder: Path) -> PreTrainedModel:
    with without_progress_bar():
        model: PreTrainedModel = AutoModel.from_pretrained(folder, dtype=torch.float32)
    return model


def _save(model: PreTrainedModel, source: Path, to: Path) -> None:
    """Writes the encoder with `modules.json` in the format of sentence-transformers. The tuned
    encoder pools by the mean, whatever its source's pooling."""
    with without_progress_bar():
        model.save_pretrained(to)
    for file in to.glob("*.safetensors"):  # these are not readable for other users
        file.chmod((to / "config.json").stat().st_mode)
    if (source / "tokenizer.json").is_file():
        for pattern in _TOKENIZER:
            for file in source.glob(pattern):
                shutil.copyfile(file, to / file.name)
    else:
        AutoTokenizer.from_pretrained(source).save_pretrained(to)
    kinds = [("Transformer", ""), ("Pooling", _POOLING)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    pooling = {
        "word_embedding_dimension": model.config.hidden_size,
        "pooling_mode_mean_tokens": True,
    }
    (to / _POOLING).mkdir()
    (to / _POOLING / "config.json").write_text(json.dumps(pooling))
    (to / "modules.json").write_text(json.dumps(modules))
