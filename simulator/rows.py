"""Rows of results as JSON, and one error for any file that cannot be written."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

Row = Mapping[str, object]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises ValueError, which names the file, instead of an OSError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from None


def write_rows(path: Path, rows: Sequence[Row], **others: Sequence[Row]) -> None:
    """Writes `{"rows": [...]}`, and `others` under their names. Raises ValueError for a file
    that cannot be written and for a number that JSON does not have."""
    content = {"rows": rows, **others}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    with writing(path):
        path.write_text(text)
