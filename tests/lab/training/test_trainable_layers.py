"""Fine-tuning of an encoder's upper layers."""

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from lab.training.early_stopping import TrainingOptions, TrainingReporter
from lab.training.finetune import TunedRanker, fine_tune
from lab.training.token_batches import TokenizedPrompts
from lab.training.trainable_layers import PartiallyTrainedEncoder
from services.encoder.encoder import padded


@pytest.fixture
def encoder() -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    return BertModel(BertConfig(vocab_size=40, num_hidden_layers=2, **sizes)).eval()


@pytest.mark.parametrize("layers", [1, 2])
def test_split_encoder_equals_whole_encoder(encoder: BertModel, layers: int) -> None:
    depth = PartiallyTrainedEncoder(encoder, layers).eval()
    texts = [[1, 5, 8, 2], [1, 4, 2]]
    ids, mask = padded(texts, 0)
    whole = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    for _ in range(2):  # computed, then cached
        states, seen = depth(texts)
        assert seen.tolist() == mask.tolist()
        for row, text in enumerate(texts):
            got, want = (s[row, : len(text)].detach().numpy() for s in (states, whole))
            assert got == pytest.approx(want, abs=5e-3)


def ignore_progress(what: str, done: int, of: int) -> None:
    """Ignores progress."""


def ignore_line(line: str) -> None:
    """Ignores log lines."""


def test_only_upper_layers_train(encoder: BertModel) -> None:
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    rng = np.random.default_rng(0)
    asked = [rng.integers(1, 40, 6).tolist() for _ in range(128)]
    lengths = torch.tensor([float(10 * ids[0]) for ids in asked])
    texts = TokenizedPrompts([[]] * 128, asked, torch.ones(128, dtype=torch.long), lengths)
    ranker = TunedRanker(encoder, 1, layers=1)
    course = TrainingOptions(epochs=20, patience=1_000, layers=1)
    tau = fine_tune(ranker, texts, texts, course, TrainingReporter(ignore_progress, ignore_line))
    changed = {k for k, v in encoder.state_dict().items() if not torch.equal(before[k], v)}
    assert tau > 0.2
    assert changed and all(key.startswith("encoder.layer.1.") for key in changed)


@pytest.mark.parametrize("layers", [-1, 3])
def test_too_many_layers_are_rejected(encoder: BertModel, layers: int) -> None:
    with pytest.raises(ValueError, match="has 2 layers"):
        PartiallyTrainedEncoder(encoder, layers)
