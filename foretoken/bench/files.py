"""Write the results of a benchmark."""

import json
from pathlib import Path


def write_json(path: Path, content: object) -> None:
    """Write JSON. Raises ValueError if the file cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
