"""Records: values read from TOML, with errors that name the file, the key and the value."""

import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails


class Record(BaseModel):
    """A table of a TOML file. Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


RecordT = TypeVar("RecordT", bound=Record)


def read_toml(text: str, where: str) -> dict[str, object]:
    """Parses TOML. Raises ValueError, which names `where`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not TOML: {error}") from None


def read_record(kind: type[RecordT], values: object, where: str) -> RecordT:
    """Builds a record. Raises ValueError, which names `where`, the first wrong key and its
    value."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {_describe(kind, error.errors()[0])}") from None


def read_text(path: Path) -> str:
    """The text of a file. Raises ValueError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8") from None


def _near(word: str, known: Iterable[str]) -> str:
    """`, did you mean …?` for the nearest known word, else the known words."""
    words = sorted(known)
    close = get_close_matches(word, words, n=1)
    return f", did you mean {close[0]}?" if close else f"; known: {', '.join(words)}"


def _describe(kind: type[Record], error: ErrorDetails) -> str:
    keys = [str(part) for part in error["loc"]]
    path = ".".join(keys)
    if error["type"] == "extra_forbidden":
        return f"unknown key {path}{_near(keys[-1], _keys(kind, keys[:-1]))}"
    if error["type"] == "missing":
        return f"{path} is missing"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{path} {message} (got {error['input']!r})" if path else message


def _keys(kind: type[Record], path: list[str]) -> Iterable[str]:
    """The keys of the table at this path."""
    for key in path:
        found = kind.model_fields[key].annotation if key in kind.model_fields else None
        tables = [found, *getattr(found, "__args__", ())]
        records = [t for t in tables if isinstance(t, type) and issubclass(t, Record)]
        if records:
            kind = records[0]
    return kind.model_fields
