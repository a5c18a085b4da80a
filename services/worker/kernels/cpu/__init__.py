"""Numba's kernels. What they are compiled to is kept in the user's cache folder, unless Numba was
told another (NUMBA_CACHE_DIR): beside the code it would go with each new version of the package, or
could not be written. Numba looks when a kernel is defined, so this comes before all of them."""

import os

from services.worker.machine import cache_folder

os.environ.setdefault("NUMBA_CACHE_DIR", cache_folder("numba"))
