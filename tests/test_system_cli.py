"""The command as a user types it: mistakes get one clear line, no traceback."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live import ROOT, command, environment

DEMO = ROOT / "models/demo"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(), **variables},
        cwd=ROOT,
    )


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    """Its one line of complaint; it said nothing else and left with an error."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    [line] = done.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--policy", "fcsf"], "unknown policy 'fcsf', did you mean fcfs?; known: fcfs, cons"),
        (["--model", "/no/such"], "no folder /no/such"),
        (["--set", "scheduler.polcy=fcfs"], "unknown config key scheduler.polcy, did you mean po"),
        (["--set", "sheduler.policy=fcfs"], "unknown config section 'sheduler', did you mean sc"),
        (["--set", "policy"], "--set takes section.key=value, got 'policy'"),
        (["--set", "preset.reserve=0.1"], "unknown preset key 'reserve', did you mean reserved?"),
        (["--set", "preset.reserved=much"], "preset.reserved takes a number, got 'much'"),
        (["--set", "preset.slice_tokens=9"], "preset.slice_tokens is a number of preset.slice=tok"),
        (["--policy", "alise", "--set", "preset.slice_tokens=0"], "slice_tokens must lie in [1, "),
        (["--set", "preset.order=random"], "unknown preset.order 'random'"),
        (["--set", "preset.reserved=2"], "reserved must lie in [0, 1], got 2"),
        (["--set", "preset.form=magic"], "unknown preset.form 'magic'; known: aggressive,"),
        (["--set", "predictor.model=magic"], "magic"),
        (["--set", "worker.block_tokens=-4"], "worker.block_tokens"),
        (
            ["--http-port", "70000"],
            "gateway.http_port: Input should be less than or equal to 65535",
        ),
        (["--kv-tokens", "-5"], "worker.kv_tokens"),
        (["--kv-dtype", "int4"], "worker.kv_dtype: Input should be 'auto' or 'int8'"),
        (["--host-gib", "-1"], "worker.host_gib: Input should be greater than or equal to 0"),
        (["--set", "predictor.model=oracle"], "predictor.oracle_file: the predictor 'oracle' need"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str):
    ports = [] if "--http-port" in arguments else ["--http-port", "0"]
    line = only_line(run("serve", "--grpc-port", "0", *ports, *arguments))
    assert line.startswith("foretoken: ")
    assert said in line


def test_a_mistyped_environment_variable_is_refused():
    line = only_line(run("serve", FORETOKEN_SHEDULER_POLICY="fcfs"))
    assert "FORETOKEN_SHEDULER_POLICY" in line and "did you mean scheduler?" in line
    line = only_line(run("serve", FORETOKEN_SCHEDULER_POLCY="fcfs"))
    assert "scheduler.polcy" in line


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_a_port_in_use_is_named(taken: int, option: str):
    other = "--grpc-port" if option == "--http-port" else "--http-port"
    line = only_line(run("serve", option, str(taken), other, "0"))
    assert f"127.0.0.1:{taken}" in line


def copy_of_demo(folder: Path) -> Path:
    shutil.copytree(DEMO, folder / "model")
    return folder / "model"


@pytest.mark.parametrize("separate", [[], ["--separate"]])
def test_a_broken_model_folder_is_named(tmp_path: Path, separate: list[str]):
    model = copy_of_demo(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    ports = ["--http-port", "0", "--grpc-port", "0"]
    line = only_line(run("serve", *ports, "--model", str(model), *separate))
    assert line.startswith("foretoken: ") and str(model) in line


def test_a_model_folder_without_a_tokenizer_is_named(tmp_path: Path):
    model = copy_of_demo(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    line = only_line(run("serve", "--http-port", "0", "--grpc-port", "0", "--model", str(model)))
    assert "tokenizer" in line and str(model) in line


def test_an_unknown_architecture_is_named(tmp_path: Path):
    model = copy_of_demo(tmp_path)
    config = json.loads((model / "config.json").read_text())
    config["model_type"] = "no-such-model"
    config["architectures"] = ["NoSuchModel"]
    (model / "config.json").write_text(json.dumps(config))
    line = only_line(run("serve", "--http-port", "0", "--grpc-port", "0", "--model", str(model)))
    assert "no-such-model" in line or "NoSuchModel" in line


def test_the_module_and_the_script_are_one_command():
    by_module = run("--help")
    script = Path(command()[0]).parent / "foretoken"
    by_script = subprocess.run(
        [str(script), "--help"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert by_module.returncode == by_script.returncode == 0
    assert "serve" in by_script.stdout and "chat" in by_script.stdout
    assert by_module.stdout.split()[4:] == by_script.stdout.split()[2:]
