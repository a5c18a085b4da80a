"""Fixtures: a server, and third-party clients that run in separate environments without hub access
and telemetry. CLIENTS_RECORD=1 records their requests in `sent/`. CLIENTS_VLLM_PYTHON names an
interpreter that has vLLM."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients import environments
from tests.clients.recorder import recording
from tests.live import serving

HERE = Path(__file__).parent
SENT = HERE / "sent"
SCRIPTS = HERE / "scripts"
CLIENT_S = 240.0
AFTER_CLIENT = "_client_|_receives_|_load_|_scores_"  # what follows a client in a test's name

ON = (
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"),
    *("DO_NOT_TRACK", "VLLM_NO_USAGE_STATS", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"),
)
OFF = ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2", "LITELLM_TELEMETRY", "TOKENIZERS_PARALLELISM")
QUIET = {
    **dict.fromkeys(ON, "1"),
    **dict.fromkeys(OFF, "false"),
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "TERM": "dumb",
    "COLUMNS": "200",
}

Run = Callable[..., str]
"""run(*command) returns its stdout, and fails with its output unless the status is 0."""


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a `foretoken serve` of the demo model."""
    folder = tmp_path_factory.mktemp("batches")
    # In the dtype that the scores are compared in.
    with serving("--dtype=float32", f"--batch-folder={folder}") as system:
        yield system.http


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL for a test's client: the server's, or a recorder's in front of it."""
    if not os.environ.get("CLIENTS_RECORD"):
        yield server
        return
    client = re.split(AFTER_CLIENT, request.node.name.removeprefix("test_"))[0]
    with recording(server) as recorder:
        yield recorder.url
    SENT.mkdir(exist_ok=True)
    recorder.save(SENT / f"{client}.json")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    home = tmp_path / "home"
    home.mkdir()

    def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            [str(each) for each in command],
            cwd=tmp_path,
            env={**os.environ, **QUIET, "HOME": str(home), **(env or {})},
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@contextmanager
def installed(name: str) -> Iterator[None]:
    if not environments.current(name):
        try:
            environments.check_room()
        except environments.NoRoom as error:
            pytest.skip(str(error))
        pytest.fail(f"{name} is not installed; run `make clients`")
    yield


@pytest.fixture(scope="session")
def python() -> Callable[[str], Path]:
    """The interpreter of a group's environment; skips where the disk has no room for it."""

    def python(group: str) -> Path:
        with installed(group):
            return environments.python_of(group)

    return python


@pytest.fixture
def script_output(run: Run, python: Callable[[str], Path], url: str) -> Callable[[str, str], dict]:
    """Returns a function that runs a script of `scripts/` and parses its JSON output."""

    def script_output(group: str, script: str) -> dict:
        return _json(run(python(group), SCRIPTS / script, url))

    return script_output


@pytest.fixture
def node_output(run: Run, url: str) -> Callable[[str], dict]:
    def script_output(script: str) -> dict:
        if not (shutil.which("node") and shutil.which("npm")):
            pytest.skip("node or npm is not installed (on Debian: apt-get install nodejs npm)")
        with installed("node"):
            packages = {"NODE_PATH": str(environments.node_home() / "node_modules")}
        return _json(run("node", SCRIPTS / script, url, env=packages))

    return script_output


def _json(printed: str) -> dict:
    last: dict = json.loads(printed.strip().splitlines()[-1])
    return last
