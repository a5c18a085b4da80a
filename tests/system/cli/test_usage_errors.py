"""Mistakes on the command line print one line and no traceback."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest

from services.policies.preset import CHOICES, DEFAULT, presets
from tests.live import ROOT, command, environment

pytestmark = pytest.mark.slow

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
    """The last line of stderr of a command that failed without a traceback."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "fcsf"], "unknown policy 'fcsf', did you mean fcfs?; known: fcfs, "),
        (
            ["--model", "/no/such"],
            "MODEL: the folder /no/such does not exist; pass a model's folder",
        ),
        (["--unknown-fields", "warn"], "gateway.unknown_fields: Input should be 'ignore' or 'ref"),
        (
            ["--dtype", "fp8"],
            "worker.dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16'",
        ),
        (["--device", "gpu"], "worker.device: "),
        (["--set", "scheduler.polcy=fcfs"], "unknown config key scheduler.polcy, did you mean po"),
        (["--set", "sheduler.policy=fcfs"], "unknown config section 'sheduler', did you mean sc"),
        (["--set", "policy"], "--set takes section.key=value, got 'policy'"),
        (["--set", "preset.reserve=0.1"], "unknown preset key 'reserve', did you mean reserved?"),
        (["--set", "preset.reserved=much"], "preset.reserved takes a number, got 'much'"),
        (
            ["--policy", "fcfs", "--set", "preset.slice_tokens=9"],
            "preset.slice_tokens is a number of preset.slice=tok",
        ),
        (["--policy", "alise", "--set", "preset.slice_tokens=0"], "slice_tokens must lie in [1, "),
        (["--set", "preset.order=random"], "unknown preset.order 'random'"),
        (["--set", "preset.reserved=2"], "reserved must lie in [0, 1], got 2"),
        (["--set", "preset.form=magic"], "unknown preset.form 'magic'; known: aggressive,"),
        (
            ["--set", "preset.batch_mode=static"],
            "preset.batch_mode=static needs preset.arrangement=batch, since with continuous "
            "requests join running ones: set preset.arrangement=batch too, or ",
        ),
        (
            ["--policy", "vs", "--set", "preset.order=alise"],
            "preset.order=alise preempts running requests, but with preset.arrangement=batch a "
            "batch runs until it has ended: set preset.arrangement=continuous, or an order that "
            "does not preempt: arrival",
        ),
        (["--presets", "/no/such.toml"], "cannot read presets from /no/such.toml: No such file"),
        (["--set", "predictor.model=magic"], "magic"),
        (["--set", "worker.block_tokens=-4"], "worker.block_tokens"),
        (
            ["--http-port", "70000"],
            "gateway.http_port: Input should be less than or equal to 65535",
        ),
        (["--kv-tokens", "-5"], "worker.kv_tokens"),
        (["--kv-dtype", "int4"], "worker.kv_dtype: Input should be 'auto' or 'int8'"),
        (["--host-gib", "-1"], "worker.host_gib: Input should be greater than or equal to 0"),
        (["--emulate", "h10-llama3-8b"], "unknown hardware 'h10-llama3-8b', did you mean h100-"),
        (["--emulate", "/no/such.toml"], "cannot read /no/such.toml: No such file or directory"),
        (
            ["--emulate", "cpu2-demo", "--emulate-lengths", "/no/such"],
            "cannot read /no/such: No such file or directory",
        ),
        (
            ["--emulate", "cpu2-demo", "--emulate-lengths", "README.md"],
            "README.md needs the columns prompt, output_tokens; it has # foretoken",
        ),
        (
            ["--emulate", "cpu2-demo", "--dtype", "bfloat16"],
            "worker.dtype has no effect on an emulated engine, which has the speed and memory of "
            "cpu2-demo: leave it out",
        ),
        (["--emulate", "cpu2-demo", "--host-gib", "2"], "worker.host_gib has no effect on an"),
        (["--emulate", "cpu2-demo", "--tensor-parallel", "2"], "worker.tensor_parallel has no"),
        (["--emulate", "cpu2-demo", "--kv-tokens", "8"], "at least one block of 16 tokens (got 8)"),
        (["--emulate", "cpu2-demo", "--set", "emulation.sigma=-1"], "emulation.sigma: Input sho"),
        (
            ["--quantization", "awq"],
            "worker.quantization: Input should be 'none' or 'int8' (got 'awq')",
        ),
        (["--set", "predictor.model=oracle"], "predictor.oracle_file: the predictor 'oracle' need"),
    ],
)
def test_invalid_setting_is_a_one_line_error(arguments: list[str], message: str):
    ports = [] if "--http-port" in arguments else ["--http-port", "0"]
    line = only_line(run("serve", "--grpc-port", "0", *ports, *arguments))
    assert line.startswith("foretoken: ")
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--polcy", "x"], "unknown option --polcy, did you mean --policy?"),
        (["serve", "-tp", "2", "--max-num-seqs=4"], "-tp: use --tensor-parallel N; --max-num-s"),
        (["serve", "-q", "awq"], "-q: use --quantization none | int8"),
        (["serve", "--enable-prefix-caching"], "is not needed: prefix caching is always on"),
        (["serve", "a", "--model", "b"], "two models are given, a and --model b; give one"),
        (["serve", "./models/dem"], "on the hub; did you mean models/demo?"),
        (["serve", "--log-level", "inof"], "got 'inof', did you mean info?"),
        (["serve", "--emulate-lengths", "f"], "--emulate-lengths needs --emulate HARDWARE, such"),
        (["serve", "--chat-template", "/no/such"], "--chat-template: the file does not exist (got"),
        (["serve", "--workers", "x"], "Invalid value for '--workers'"),
        (["serve", "--port"], "'--port' requires an argument"),
        (["serve", "a", "b", "--model", "b"], "two models are given, a and --model b; give one"),
        (
            ["serve", "models/demo", "models/demo"],
            "two models have the name demo; write NAME=MODEL for one of them",
        ),
        (
            ["serve", "a=models/demo", "b=models/demo", "--gateways", "0"],
            "several models need a gateway process: give --gateways 1 or more",
        ),
        (["sreve"], "No such command 'sreve'. Did you mean 'serve'?"),
        (["why"], "Missing argument 'ID'."),
        (
            ["key", "a b"],
            "a key name has at most 64 letters, digits, dots, dashes or underscores; got 'a b'",
        ),
        (["chat", "--server", "http://:1"], "'http://:1' is not a server address"),
        (["bench"], "no server given: set --server, for example http://127.0.0.1:8000"),
        (["bench", "127.0.0.1:1"], "no server answers at http://127.0.0.1:1: Connection refused"),
        (["bench", "u", "--rate", "1", "--concurrency", "2"], "--rate selects an open loop and"),
        (["bench", "u", "--arrivals", "bursty"], "unknown arrivals 'bursty'; known: poisson, con"),
        (["bench", "u", "--endpoint", "chatt"], "chat or completions, did you mean chat?"),
        (["bench", "u", "--input-tokens", "0"], "is not a length; use 128, 64-512"),
        (["bench", "u", "--prompts", "/no/such"], "--prompts: cannot read /no/such: "),
        (["why", "x", "--log", "/no/such"], "--log: cannot read /no/such: No such file"),
        (["simulate", "--plot", "/no/such"], "--plot: the folder does not exist; create it"),
        (["twin", "/no/such"], "cannot read /no/such: No such file"),
        (["twin", "f", "--json", "/no/such/f"], "/no/such/f: the folder /no/such does not"),
        (["simulate", "--html", "/no/such/f"], "/no/such/f: the folder /no/such does not"),
        (["simulate", "--html", "/"], "cannot write /: it is a folder; name a file in it"),
        (["bench", "u", "--prompts", "f", "--input-tokens", "9"], "--prompts sets the len"),
        (["bench", "u", "--sla", "fast:ttft=1"], "--sla takes CLASS:BUDGET=SECONDS,… of ttft_s, "),
        (["bench", "u", "--sla", "fast:ttft_s=x"], "ttft_s must be a number of seconds, not 'x'"),
        (["bench", "u", "--as-class", "mine"], "--as-class mine has no budgets; set them with"),
        (["bench", "u", "--json", "/no/such/f"], "/no/such/f: the folder /no/such does not"),
    ],
)
def test_usage_error_is_one_line_with_status_2(arguments: list[str], message: str):
    done = run(*arguments)
    line = only_line(done)
    assert done.returncode == 2 and done.stdout == ""
    assert line.startswith("foretoken: ") and message in line


def test_version_is_the_package_version():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"foretoken {version('foretoken')}\n")


def test_quick_commands_import_nothing_heavy():
    """`--version` and a mistyped option do not import PyTorch."""
    heavy = {"torch", "transformers", "numpy", "grpc", "fastapi", "rich.console", "uvloop"}
    program = (
        "import sys\n"
        "from foretoken.__main__ import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)"
    )
    for arguments in (["--version"], ["serve", "--polcy"], ["serve", "-tp", "2"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            capture_output=True, text=True, env={**environment(), "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        imported = set(done.stderr.split())
        assert "typer" in imported and not imported & heavy, imported & heavy


def test_key_command_prints_key_and_hash_line():
    first, second = run("key", "ann"), run("key", "ann")
    assert first.stdout == f"ann:{sha256(first.stderr.strip().encode()).hexdigest()}\n"
    assert first.stderr != second.stderr


@pytest.mark.parametrize("arguments", [["-h"], ["serve", "-h"], ["bench", "-h"], ["chat", "-h"]])
def test_help_groups_commands(arguments: list[str]):
    done = run(*arguments)
    assert done.returncode == 0 and done.stderr == ""
    panels = [line for line in done.stdout.splitlines() if line.startswith("╭─")]
    assert len(panels) >= 1 and "Traceback" not in done.stdout


MINE = """
[mine]
like = "alise"
order = "arrival"
params = { watermark = 0.9 }
"""


def test_presets_command_lists_all_presets(tmp_path: Path):
    mine = tmp_path / "mine.toml"
    mine.write_text(MINE)
    done = run("presets", "--presets", str(mine))
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(presets()) + 1
    assert [line.split()[0] for line in lines] == [*presets(), "mine"]
    assert [line for line in lines if line.endswith("(the default)")] == [
        line for line in lines if line.startswith(f"{DEFAULT} ")
    ]
    assert lines[-1].split(maxsplit=1)[1] == "like alise"


def test_presets_command_prints_one_preset(tmp_path: Path):
    mine = tmp_path / "mine.toml"
    mine.write_text(MINE)
    shown = run("presets", "mine", "--presets", str(mine)).stdout.splitlines()
    assert shown[:2] == ["mine: like alise", f"from {mine}"]
    cells = {line.split()[0]: line.split()[1] for line in shown[3:-2]}
    preset = presets(str(mine))["mine"]
    assert cells == {key: getattr(preset, key) for key in CHOICES} | {
        "watermark": "0.9",
        "slice_tokens": "32",
    }
    assert "  watermark       0.9             0 to 1" in shown
    assert any(
        "batch_size      7               default; 1 to 4096" in line
        for line in (
            run("presets", "fixed", "--presets", str(_fixed(tmp_path))).stdout.splitlines()
        )
    )


def _fixed(folder: Path) -> Path:
    file = folder / "fixed.toml"
    file.write_text('[fixed]\nlike = "alise"\norder="arrival"\narrangement="batch"\nform="fixed"\n')
    return file


def test_mistyped_preset_is_a_one_line_error():
    line = only_line(run("presets", "alice"))
    assert line.startswith("foretoken: unknown preset 'alice', did you mean alise?; known: fcfs, ")


def test_invalid_user_preset_is_a_one_line_error(tmp_path: Path):
    mine = tmp_path / "mine.toml"
    mine.write_text(MINE.replace("order", "ordr"))
    ports = ["--http-port", "0", "--grpc-port", "0"]
    line = only_line(run("serve", *ports, "--presets", str(mine), "--policy", "mine"))
    assert line.startswith(f"foretoken: {mine}, [mine]: unknown cell 'ordr', did you mean order?")


def test_why_without_server_or_log_is_a_one_line_error(tmp_path: Path):
    line = only_line(run("why", "4fe1aa", "--server", "127.0.0.1:1"))
    assert line.startswith("foretoken why: ") and "127.0.0.1:1" in line
    text = tmp_path / "text"
    text.write_text("nothing\n")
    line = only_line(run("why", "4fe1aa", "--log", str(text)))
    assert line.startswith(f"foretoken: {text} is not a foretoken event log")


def test_unknown_environment_variable_is_rejected():
    line = only_line(run("serve", FORETOKEN_SHEDULER_POLICY="fcfs"))
    assert "FORETOKEN_SHEDULER_POLICY" in line and "did you mean scheduler?" in line
    line = only_line(run("serve", FORETOKEN_SCHEDULER_POLCY="fcfs"))
    assert "scheduler.polcy" in line


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--http-port", "--grpc-port"])
def test_serve_names_a_port_in_use(taken: int, option: str):
    other = "--grpc-port" if option == "--http-port" else "--http-port"
    line = only_line(run("serve", option, str(taken), other, "0"))
    assert f"127.0.0.1:{taken}" in line


def copy_of_demo(folder: Path) -> Path:
    shutil.copytree(DEMO, folder / "model")
    return folder / "model"


@pytest.mark.slow
@pytest.mark.parametrize("separate", [[], ["--separate"]])
def test_serve_names_a_broken_model_folder(tmp_path: Path, separate: list[str]):
    model = copy_of_demo(tmp_path)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    ports = ["--http-port", "0", "--grpc-port", "0"]
    line = only_line(run("serve", *ports, "--model", str(model), *separate))
    assert line.startswith("foretoken: ") and str(model) in line


def without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def with_awq(model: Path) -> None:
    change_config(model, quantization_config={"quant_method": "awq", "bits": 4})


def change_config(model: Path, **values: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            without_tokenizer,
            "has no tokenizer files, such as tokenizer.json: copy them from the checkpoint that "
            "its weights come from",
        ),
        (
            without_weights,
            "has no weights (model.safetensors or model.safetensors.index.json): download them",
        ),
        (
            with_awq,
            "is quantized with AWQ, which foretoken does not read: serve the unquantized "
            "checkpoint",
        ),
    ],
)
def test_serve_refuses_a_folder_with_one_sentence(
    change: Callable[[Path], None], reason: str, tmp_path: Path
):
    model = copy_of_demo(tmp_path)
    change(model)
    done = run("serve", str(model))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"foretoken: MODEL: {model} {reason}\n"


@pytest.mark.slow
def test_serve_refuses_attention_that_it_cannot_replace(tmp_path: Path):
    """A family that only the worker knows to be unsupported."""
    model = copy_of_demo(tmp_path)
    change_config(model, model_type="bloom", architectures=["BloomForCausalLM"])
    done = run("serve", "--http-port", "0", "--grpc-port", "0", "--model", str(model))
    assert done.returncode == 2 and "ready" not in done.stdout
    assert only_line(done) == (
        f"foretoken: cannot load model {str(model)!r}: it is a BloomForCausalLM, which computes "
        "attention in code of its own, where foretoken cannot use its paged KV cache: serve a "
        "model of a family that docs/models.md lists"
    )


@pytest.mark.slow
def test_serve_names_an_unknown_architecture(tmp_path: Path):
    model = copy_of_demo(tmp_path)
    change_config(model, model_type="no-such-model", architectures=["NoSuchForCausalLM"])
    line = only_line(run("serve", "--http-port", "0", "--grpc-port", "0", "--model", str(model)))
    assert "it is of the type no-such-model, which transformers" in line


def test_module_and_script_are_the_same_command():
    by_module = run("--help")
    script = Path(command()[0]).parent / "foretoken"
    by_script = subprocess.run(
        [str(script), "--help"], capture_output=True, text=True, env=dict(os.environ)
    )
    assert by_module.returncode == by_script.returncode == 0
    assert "serve" in by_script.stdout and "chat" in by_script.stdout
    assert by_module.stdout == by_script.stdout
