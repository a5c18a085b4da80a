"""Where code that was compiled here is kept from one start to the next."""

import os
from hashlib import blake2b
from pathlib import Path

KERNELS = Path(__file__).parent / "kernels" / "cpu"


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
    made of: each state of the kernels has a folder of its own. Who names another folder, or does
    without this, empties it when they change.
    """
    digest = blake2b(digest_size=8)
    for file in sorted(KERNELS.glob("*.py")):
        digest.update(file.read_bytes())
    os.environ.setdefault("NUMBA_CACHE_DIR", cache_folder(f"numba/{digest.hexdigest()}"))
