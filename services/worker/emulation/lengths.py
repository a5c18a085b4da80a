"""Reads the file of prompts and the lengths of their answers."""

import json
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from services.runtime.csv_table import MAX_TOKENS, open_text, read_csv

PROMPT, TOKENS = "prompt", "output_tokens"
WHOLE = f"a whole number from 0 to {MAX_TOKENS:,}"


def read_lengths(path: Path) -> dict[str, int]:
    """Output tokens by normalised prompt, from JSON lines or CSV with a header, plain or gzip, with
    `prompt` and `output_tokens`. Other fields are ignored; of equal prompts, the first one counts.
    An empty answer has one token, its end.

    Raises ValueError with a sentence that names the file, and the line of a bad row.
    """
    rows = _read_json(path) if _is_json(path) else _read_csv(path)
    known: dict[str, int] = {}
    for prompt, tokens in rows:
        known.setdefault(normalise(prompt), max(1, tokens))
    if not known:
        raise ValueError(f"{path} has no rows")
    return known


def normalise(text: str) -> str:
    """The text as prompts are compared: tokenizers may compose characters, and templates may trim
    the ends."""
    return unicodedata.normalize("NFC", text).strip()


def _read_csv(path: Path) -> Iterable[tuple[str, int]]:
    table = read_csv(path, (PROMPT, TOKENS))
    return zip(table.columns[PROMPT], table.lengths(TOKENS, 0).tolist(), strict=True)


def _is_json(path: Path) -> bool:
    """Whether the first character begins a JSON object."""
    with open_text(path) as file:
        return file.read(64).lstrip().startswith("{")


def _read_json(path: Path) -> Iterator[tuple[str, int]]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _read_row(f"{path}, line {number}", line)


def _read_row(where: str, line: str) -> tuple[str, int]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row must be a JSON object")
    for name in (PROMPT, TOKENS):
        if name not in row:
            raise ValueError(f"{where}: {name} is missing")
    prompt, tokens = row[PROMPT], row[TOKENS]
    if not isinstance(prompt, str):
        raise ValueError(f"{where}: {PROMPT} must be text, got {prompt!r}")
    if type(tokens) is not int or not 0 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{where}: {TOKENS} must be {WHOLE}, got {tokens!r}")
    return prompt, tokens
