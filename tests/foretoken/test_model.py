"""Locating a model: a folder, a complete snapshot in the hub's cache, or an error."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken.running.model import Located, locate, require_servable
from foretoken.running.options import demo_model
from services.runtime.config import ConfigError
from tests.live import ROOT, environment

COMMIT = "0" * 40


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models" / "Qwen3-8B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["models/Qwen3-8B", "./models/Qwen3-8B", "{here}/models/Qwen3-8B"])
def test_locate_returns_a_folder_unchanged(beside: Path, name: str) -> None:
    given = name.format(here=beside)
    assert locate(given) == Located(given)


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("./models/Qwen3-8", "; did you mean models/Qwen3-8B?"),
        ("{here}/models/Qen3-8B", "; did you mean {here}/models/Qwen3-8B?"),
        ("/no/such/folder", ""),
        ("models/Qwen3-8B/more", ""),
        ("../nothing/like/it/", ""),
    ],
)
def test_mistyped_folder_is_reported_with_a_suggestion(
    beside: Path, name: str, suggestion: str
) -> None:
    given = name.format(here=beside)
    with pytest.raises(ConfigError) as caught:
        locate(given)
    assert str(caught.value) == (
        f"MODEL: the folder {given} does not exist; pass a model's folder or its name on the hub"
        + suggestion.format(here=beside)
    )


def test_locate_rejects_a_file(beside: Path) -> None:
    (beside / "x.bin").touch()
    with pytest.raises(ConfigError, match=r"MODEL: x.bin is a file; pass a model's folder"):
        locate("x.bin")
    (beside / "x.gguf").touch()
    with pytest.raises(ConfigError, match=r"MODEL: x.gguf has its weights as GGUF, which"):
        locate("x.gguf")


def test_folder_must_be_servable(tmp_path: Path) -> None:
    """Without weights, such as for emulated hardware, a tokenizer is enough."""
    with pytest.raises(ConfigError, match=r"MODEL: mine has no tokenizer files"):
        require_servable("mine", str(tmp_path), weights=False)
    (tmp_path / "tokenizer.json").touch()
    require_servable("mine", str(tmp_path), weights=False)
    with pytest.raises(ConfigError, match=r"MODEL: mine has no config\.json"):
        require_servable("mine", str(tmp_path), weights=True)
    require_servable("mine", demo_model(), weights=True)


PROGRAM = """
import sys
from foretoken.running.model import locate
try:
    print(locate(sys.argv[1]))
except ValueError as error:
    print("error:", error)
"""


def located(name: str, home: Path, where: Path, **variables: str) -> str:
    """Locate in a new process, because the hub's library reads its variables at import."""
    own = {**environment(), "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    own.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        capture_output=True, text=True, timeout=60, env=own | variables, cwd=where,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def snapshot(home: Path, *files: str) -> Path:
    """Create a snapshot in the layout of the hub's cache."""
    repo = home / "hub" / "models--Qwen--Qwen3"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).write_text("{}")
    return folder


def test_complete_snapshot_needs_no_hub(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, "config.json", "model.safetensors")
    found = located("Qwen/Qwen3", tmp_path, tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
    assert found == repr(Located(str(folder), "Qwen/Qwen3"))


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "model-2.safetensors"])
def test_incomplete_snapshot_is_not_used(tmp_path: Path, missing: str) -> None:
    files = {"config.json", "model.safetensors", "model-1.safetensors"} - {missing}
    folder = snapshot(tmp_path, *files)
    if missing.startswith("model-"):
        shards = {"weight_map": {"a": "model-1.safetensors", "b": missing}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    elif missing == "model.safetensors":
        (folder / "model-1.safetensors").unlink()
    message = located("Qwen/Qwen3", tmp_path, tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
    assert message.startswith(
        "error: MODEL: the folder Qwen/Qwen3 does not exist, and http://127.0.0.1:1 cannot be"
    )


def test_unreachable_hub_is_reported_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    message = located("Qwen/Qwen3", tmp_path, tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
    assert message.endswith(
        "; pass a folder, or download the model on a machine with a network; did you mean "
        "Qwen/Qwen3-8B?"
    )
    message = located("Qwen/Qwen3", tmp_path, tmp_path, HF_HUB_OFFLINE="1")
    assert "and HF_HUB_OFFLINE is set; pass a folder" in message


@pytest.mark.slow
def test_hub_lookup_times_out(tmp_path: Path) -> None:
    """The hub accepts the connection and never answers; the library's own retries take minutes."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        message = located("Qwen/Qwen3", tmp_path, tmp_path, HF_ENDPOINT=endpoint)
    assert f"and {endpoint} cannot be reached" in message
