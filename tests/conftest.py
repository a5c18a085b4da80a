"""What holds for every test.

Triton reads TRITON_INTERPRET when it is first imported, PyTorch OMP_NUM_THREADS, Numba where it
keeps what it compiled: all are set before anything is. Tests run side by side, one process a core,
so each computes in one thread.
"""

import os
import shutil

import pytest
from hypothesis import settings

from services.worker.compiled_code import keep_what_numba_compiles

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
keep_what_numba_compiles()

# How long an example takes says only how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Programs that no Python package brings: the fixture that asks for one, its name, and its package.
PROGRAMS = {
    "redis_program": ("redis-server", "redis-server"),
    "prometheus_program": ("prometheus", "prometheus"),
    "promtool_program": ("promtool", "prometheus"),
    "chromium_program": ("chromium", "chromium"),
}


def missing(fixture: str) -> str:
    """What to say where the program that a fixture stands for is not installed; else nothing."""
    program, package = PROGRAMS[fixture]
    said = f"{program} is not installed; install it (on Debian: apt-get install {package})"
    return "" if shutil.which(program) else said


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip whoever asks for a program that is missing, from here, so that one line says it."""
    if isinstance(item, pytest.Function):
        for fixture in PROGRAMS:
            if fixture in item.fixturenames and (why := missing(fixture)):
                pytest.skip(why)


def _program(fixture: str) -> str:
    found = shutil.which(PROGRAMS[fixture][0])
    assert found, missing(fixture)
    return found


@pytest.fixture(scope="session")
def redis_program() -> str:
    """Where redis-server is."""
    return _program("redis_program")


@pytest.fixture(scope="session")
def prometheus_program() -> str:
    """Where prometheus is."""
    return _program("prometheus_program")


@pytest.fixture(scope="session")
def promtool_program() -> str:
    """Where promtool is; it comes with prometheus."""
    return _program("promtool_program")


@pytest.fixture(scope="session")
def chromium_program() -> str:
    """Where Debian's Chromium is."""
    return _program("chromium_program")
