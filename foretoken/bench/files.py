"""What a benchmark needs of its machine: files open at once, and one to write."""

import json
import resource
from pathlib import Path


def allow_open_files() -> None:
    """A connection a request that waits is, under overload, more than the usual 1,024 files; so it
    is for processes started after this."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def write_json(path: Path, content: object) -> None:
    """Raises ValueError where it can't."""
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
