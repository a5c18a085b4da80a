"""What holds for every test.

Triton reads TRITON_INTERPRET when it is first imported, PyTorch OMP_NUM_THREADS: both are set
before anything is. Tests run side by side, one process a core, so each computes in one thread.
"""

import os
import shutil

import pytest
from hypothesis import settings

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says only how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

REDIS = shutil.which("redis-server")
NO_REDIS = "redis-server is not installed; install it (on Debian: apt-get install redis-server)"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip whoever asks for a program that is missing, from here, so that one line says it."""
    if not REDIS and isinstance(item, pytest.Function) and "redis_program" in item.fixturenames:
        pytest.skip(NO_REDIS)


@pytest.fixture(scope="session")
def redis_program() -> str:
    """Where redis-server is."""
    assert REDIS, NO_REDIS
    return REDIS
