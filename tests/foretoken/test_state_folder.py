"""Where a server keeps what it learns, and that it shares this with no other server."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from foretoken.running.options import ServeOptions, model_sections
from foretoken.running.state_folder import keeping_outcomes
from services.runtime.config import ConfigError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state folder."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "foretoken"


@contextmanager
def server(
    state_dir: Path | str = "", *sets: str, name: str = "", emulate: str = ""
) -> Iterator[str]:
    """The path of the outcomes while a server runs; empty: none, or in memory."""
    options = ServeOptions(served_model_name=name, emulate=emulate, sets=sets)
    with keeping_outcomes(str(state_dir), model_sections(options)) as [overrides]:
        yield overrides["log"].get("path", "")


def fail(state_dir: Path, sentence: str, *sets: str) -> None:
    with pytest.raises(ConfigError, match=sentence), server(state_dir, *sets):
        pass


def test_next_server_of_a_model_continues_where_the_last_one_stopped(home: Path) -> None:
    for _ in range(2):
        with server(name="org/a") as path:
            assert path == f"{home}/org%2Fa/outcomes.sqlite"


def test_servers_at_the_same_time_share_nothing(home: Path, tmp_path: Path) -> None:
    with (
        server() as first, server() as second, server(name="other") as other,
        server(emulate="h100-llama3-8b") as emulated, server(tmp_path / "b") as named,
    ):  # fmt: skip
        found = [first, second, other, emulated, named]
    folders = [home / name for name in ("demo", "demo-2", "other", "demo-emulated")]
    assert found == [f"{folder}/outcomes.sqlite" for folder in (*folders, tmp_path / "b" / "demo")]


def test_each_of_several_models_has_a_folder(tmp_path: Path) -> None:
    options = ServeOptions(served_model_name="small", more_models=[("large", "/models/large")])
    with keeping_outcomes(str(tmp_path), model_sections(options)) as models:
        paths = [overrides["log"]["path"] for overrides in models]
    assert paths == [f"{tmp_path}/{name}/outcomes.sqlite" for name in ("small", "large")]


def test_named_folder_has_one_server(tmp_path: Path) -> None:
    with server(tmp_path):
        fail(tmp_path, rf"process {os.getpid()} keeps its state in .*demo;")
    with server(tmp_path) as path:
        assert path


def test_folder_that_cannot_be_made(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server without a writable home serves all the same. One with a given folder says why that
    cannot be used."""
    home.parent.write_text("a file")
    with server() as path:
        assert path == ""
    assert "cannot keep what is learned in" in caplog.text and "Not a directory" in caplog.text
    fail(home, r"--state-dir: cannot use .*: Not a directory")


def test_given_log_stays(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ("/else/where", ""):
        with server("", f"log.path={given}") as path:
            assert path == given
    fail(home, "leave out --state-dir", "log.path=/else/where")
    for model in ("history", "max"):  # neither reads prompts
        with server("", f"predictor.model={model}") as path:
            assert path == ""
    monkeypatch.setenv("FORETOKEN_LOG_PATH", "redis://here")
    with server() as path:
        assert path == ""  # the predictor reads the variable
    assert not home.exists()
