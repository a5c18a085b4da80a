"""Rows of results as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Mapping[str, object]


def write_rows(path: Path, rows: Sequence[Row], **others: Sequence[Row]) -> None:
    """Writes `{"rows": [...]}`, and `others` under their names. Raises OSError, and ValueError for
    a number that JSON does not have."""
    content = {"rows": rows, **others}
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
