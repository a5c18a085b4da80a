"""The folders that keep compiled code between starts."""

import os
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree

KERNELS = Path(__file__).parent / "kernels" / "cpu"
UNUSED_S = 30 * 86_400.0  # compiled code of kernels unused for this long is removed


def cache_folder(name: str) -> str:
    """The user's cache folder; writers create it."""
    given = os.environ.get("XDG_CACHE_HOME")
    folder = Path(given) if given else Path("~/.cache").expanduser()
    return str(folder / "foretoken" / name)


def set_numba_cache_folder() -> None:
    """Sets Numba's cache folder to the user's, unless NUMBA_CACHE_DIR is set: the folder of the
    code may not be writable. Must run before the first import of a kernel, because Numba reads the
    setting when a kernel is defined.

    Numba recompiles when a kernel's file changes, but not when a file that it imports changes. Each
    version of the kernels therefore has a separate folder, and folders unused for long are removed.
    With NUMBA_CACHE_DIR the user empties the folder when kernels change.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    digest = blake2b(digest_size=8)
    for file in sorted(KERNELS.rglob("*.py")):
        digest.update(file.read_bytes())
    folder = Path(cache_folder("numba")) / digest.hexdigest()
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    with suppress(OSError):  # missing, or not writable
        os.utime(folder)
        _remove_unused(folder.parent)


def _remove_unused(folder: Path) -> None:
    for version in folder.iterdir():
        if version.stat().st_mtime < time.time() - UNUSED_S:
            rmtree(version, ignore_errors=True)
