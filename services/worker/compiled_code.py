"""Where code that was compiled here is kept from one start to the next."""

import os
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from shutil import rmtree

KERNELS = Path(__file__).parent / "kernels" / "cpu"
UNUSED_S = 30 * 86_400.0  # after which what a state of the kernels was compiled to goes


def cache_folder(name: str) -> str:
    """Of the user; made by whoever writes to it."""
    given = os.environ.get("XDG_CACHE_HOME")
    folder = Path(given) if given else Path("~/.cache").expanduser()
    return str(folder / "foretoken" / name)


def keep_what_numba_compiles() -> None:
    """In the user's cache folder, unless Numba was told another (NUMBA_CACHE_DIR): beside the code
    it could perhaps not be written. Numba looks when a kernel is defined, so this is called before
    the first is imported.

    Numba compiles anew what has changed in a kernel's own file, and knows nothing of those it is
    made of: each state of the kernels has a folder of its own, and those that nobody has begun with
    for long are removed. Who names another folder, or does without this, empties it when they
    change.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    digest = blake2b(digest_size=8)
    for file in sorted(KERNELS.glob("*.py")):
        digest.update(file.read_bytes())
    folder = Path(cache_folder("numba")) / digest.hexdigest()
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    with suppress(OSError):  # not there yet, or not to be written
        os.utime(folder)
        _remove_unused(folder.parent)


def _remove_unused(folder: Path) -> None:
    for each in folder.iterdir():
        if each.stat().st_mtime < time.time() - UNUSED_S:
            rmtree(each, ignore_errors=True)
