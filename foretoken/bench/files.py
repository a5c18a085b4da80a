"""What a benchmark writes."""

import json
from pathlib import Path


def write_json(path: Path, content: object) -> None:
    """Raises ValueError where it can't."""
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
