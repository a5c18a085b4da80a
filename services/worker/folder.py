"""What a worker reads of a model's folder without its weights: tokenizer and end tokens."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.runtime.refusals.folder import has_only_tekken
from services.runtime.tekken import load_tekken


def load_tokenizer(folder: str) -> Tokenizer:
    """Raises ValueError with a sentence if the folder has no tokenizer that can be read."""
    path = Path(folder)
    if path.is_dir() and has_only_tekken(path):
        return _load_tekken(path)
    file = path / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # of many types; the first line says what is wrong
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"worker.model: the tokenizer {file} cannot be read: {reason}") from None


def _load_tekken(folder: Path) -> Tokenizer:
    try:
        tokenizer: Tokenizer = load_tekken(folder).backend_tokenizer
    except ValueError as error:
        raise ValueError(f"worker.model: {error}") from None
    return tokenizer


def read_eos_ids(folder: str) -> frozenset[int]:
    """The tokens that end an answer, as the engine that computes reads them. Raises ValueError with
    a sentence if there are none."""
    config = read_json(Path(folder) / "config.json")
    generation = read_json(Path(folder) / "generation_config.json")
    text = config.get("text_config") or config
    given = generation.get("eos_token_id", text.get("eos_token_id"))
    listed = given if isinstance(given, list) else [given]
    ids = frozenset(token for token in listed if isinstance(token, int))
    if not ids:
        raise ValueError(
            f"worker.model: {folder} names no eos_token_id in config.json or "
            "generation_config.json, with which answers end"
        )
    return ids


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object of the model; empty if the file does not exist. Raises ValueError."""
    try:
        content = json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"worker.model: {file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"worker.model: {file} is not a JSON object")
    return content
