"""Stores the features of data sets on disk, so that repeated runs read each prompt once."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from services.predictor.interface import LAYERS, NUMBERS, WORD_COLUMNS, Features, Prompt

log = logging.getLogger(__name__)

Make = Callable[[Sequence[Prompt]], list[Features]]


class FeatureStore:
    """A folder of .npz files named by the hash of the encoder's name and the prompts.

    Several processes may share it: files are written completely and then renamed. A broken file is
    replaced. Delete the folder after changing the extractor.
    """

    def __init__(self, folder: Path, encoder: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._salt = f"{encoder} {LAYERS} {WORD_COLUMNS} {NUMBERS}"

    def get(self, prompts: Sequence[Prompt], make: Make) -> list[Features]:
        """Returns the features from disk, or makes and stores them."""
        path = self._folder / f"{self._key(prompts)}.npz"
        if path.exists():
            try:
                return _load(path)
            except (OSError, ValueError, KeyError, BadZipFile) as error:
                log.warning("%s is broken and is replaced: %s", path, error)
        features = make(prompts)
        _save(path, features)
        return features

    def _key(self, prompts: Sequence[Prompt]) -> str:
        digest = hashlib.sha256(self._salt.encode())
        for prompt in prompts:
            digest.update(repr(astuple(prompt)).encode(errors="surrogatepass"))
        return digest.hexdigest()[:32]


def _save(path: Path, features: Sequence[Features]) -> None:
    part = path.with_suffix(".part.npz")
    np.savez(
        part,
        instruction=np.stack([f.instruction for f in features]),
        user_input=np.stack([f.user_input for f in features]),
        numbers=np.stack([f.numbers for f in features]),
        words=np.concatenate([f.words for f in features]),
        ends=np.cumsum([len(f.words) for f in features]),
    )
    part.rename(path)


def _load(path: Path) -> list[Features]:
    with np.load(path) as kept:
        words = np.split(kept["words"], kept["ends"][:-1])
        columns = (kept["instruction"], kept["user_input"], words, kept["numbers"])
        return [Features(*parts) for parts in zip(*columns, strict=True)]
