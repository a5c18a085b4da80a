"""Settings for all tests.

TRITON_INTERPRET, OMP_NUM_THREADS and Numba's cache directory are set before Triton, PyTorch and
Numba are imported, which read them. Tests run in parallel, one process per core, so each process
computes in one thread.
"""

import gc
import os
import shutil
from collections.abc import Iterator

import pytest
from hypothesis import is_hypothesis_test, settings

from services.worker.compiled_code import set_numba_cache_folder

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
set_numba_cache_folder()

# `fixed` tries a few examples, the same in every run. `fresh` and `sample` draw new ones and print
# how to reproduce a failure: many for `make soak`, fewer in CI. None has a deadline: the time of an
# example depends on the load of the machine.
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=40)
for profile, count in (("fresh", 400), ("sample", 60)):
    settings.register_profile(
        profile, deadline=None, derandomize=False, database=None, print_blob=True,
        max_examples=count,
    )  # fmt: skip
settings.load_profile("fixed")

COLLECTIONS = (5_000, 10, 50)  # gc thresholds

# Programs that no Python package provides, by fixture: the program and its Debian package.
PROGRAMS = {
    "redis_program": ("redis-server", "redis-server"),
    "prometheus_program": ("prometheus", "prometheus"),
    "promtool_program": ("promtool", "prometheus"),
    "chromium_program": ("chromium", "chromium"),
    "openssl_program": ("openssl", "openssl"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks property tests for `-m property`."""
    for item in items:
        if is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.property)


def pytest_collection_finish() -> None:
    """Collects garbage rarely, and never visits what the imports of all tests have made: with
    Python's own thresholds that takes a sixth of the tests' CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


def missing(fixture: str) -> str:
    """An install hint for the fixture's program; empty if it is installed."""
    program, package = PROGRAMS[fixture]
    message = f"{program} is not installed; install it (on Debian: apt-get install {package})"
    return "" if shutil.which(program) else message


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests with a missing program, here so that each skip is reported in one line."""
    if isinstance(item, pytest.Function):
        for fixture in PROGRAMS:
            if fixture in item.fixturenames and (hint := missing(fixture)):
                pytest.skip(hint)


@pytest.fixture(scope="session", autouse=True)
def own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers of tests keep what they learn apart from the user's servers."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


def _program(fixture: str) -> str:
    found = shutil.which(PROGRAMS[fixture][0])
    assert found, missing(fixture)
    return found


@pytest.fixture(autouse=True)
def worker_integrity(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """After a slow test, runs `check_integrity` on each WorkerState that it created in this
    process."""
    if request.node.get_closest_marker("slow") is None:
        yield
        return
    from services.worker.requests.state import WorkerState
    from services.worker.requests.types.limits import Limits

    states: list[WorkerState] = []  # strong references: a test drops its engines when it returns
    create = WorkerState.__init__

    def create_and_record(state: WorkerState, limits: Limits) -> None:
        create(state, limits)
        states.append(state)

    monkeypatch.setattr(WorkerState, "__init__", create_and_record)
    yield
    for state in states:
        state.check_integrity()


@pytest.fixture(scope="session")
def redis_program() -> str:
    """Path of redis-server."""
    return _program("redis_program")


@pytest.fixture(scope="session")
def prometheus_program() -> str:
    """Path of prometheus."""
    return _program("prometheus_program")


@pytest.fixture(scope="session")
def openssl_program() -> str:
    """Path of openssl, which makes certificates."""
    return _program("openssl_program")


@pytest.fixture(scope="session")
def promtool_program() -> str:
    """Path of promtool, which is part of prometheus."""
    return _program("promtool_program")


@pytest.fixture(scope="session")
def chromium_program() -> str:
    """Path of Debian's Chromium."""
    return _program("chromium_program")
