"""Reads the oracle's file of known answer lengths."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from services.forecast import MAX_FORECAST_TOKENS
from services.predictor.encoder.extract import cut
from services.predictor.interface import Wording
from services.runtime.config import ConfigError

KEY = "predictor.oracle_file"

KnownLength = tuple[str, Wording, int]  # file and line, wording, output tokens


def read_lengths(path: str, max_text_bytes: int) -> dict[Wording, int]:
    """Reads JSON lines with `prompt` (the user input), `output_tokens` and optionally
    `instruction`, which restricts the line to one system prompt. Other fields are ignored.

    Texts are truncated like those of requests. Raises ConfigError with the line.
    """
    if not path:
        raise ConfigError(
            f"{KEY}: the predictor 'oracle' needs a file of JSON lines "
            '{"prompt": "...", "output_tokens": 7}'
        )
    try:
        with Path(path).open(encoding="utf-8") as file:
            return _gathered(path, _rows(path, file, max_text_bytes))
    except OSError as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{KEY}: {path} is not valid UTF-8") from None


def _gathered(path: str, rows: Iterable[KnownLength]) -> dict[Wording, int]:
    known: dict[Wording, int] = {}
    first: dict[Wording, str] = {}
    for where, asked, tokens in rows:
        if known.setdefault(asked, tokens) != tokens:
            raise ConfigError(
                f"{where}: {tokens} output_tokens for the prompt of {first[asked]}, which has "
                f"{known[asked]}"
            )
        first.setdefault(asked, where)
    if not known:
        raise ConfigError(f"{KEY}: {path} has no rows")
    return known


def _rows(path: str, lines: Iterable[str], max_text_bytes: int) -> Iterator[KnownLength]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{KEY}: {path}:{number}"
            yield where, *_row(where, line, max_text_bytes)


def _row(where: str, line: str, max_text_bytes: int) -> tuple[Wording, int]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a row must be a JSON object")
    prompt, instruction, tokens = (row.get(k) for k in ("prompt", "instruction", "output_tokens"))
    if not isinstance(prompt, str):
        raise ConfigError(f"{where}: 'prompt' must be text")
    if not isinstance(instruction, str | None):
        raise ConfigError(f"{where}: 'instruction' must be text")
    if type(tokens) is not int or not 1 <= tokens <= MAX_FORECAST_TOKENS:
        raise ConfigError(f"{where}: 'output_tokens' must be a number, 1 to {MAX_FORECAST_TOKENS}")
    meant = None if instruction is None else cut(instruction, max_text_bytes)
    return (meant, cut(prompt, max_text_bytes)), tokens
