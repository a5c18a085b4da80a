"""Mistakes in the options that choose an engine print one line and no traceback."""

import pytest

from tests.system.cli.test_usage_errors import only_line, run

OPENAI = "--engine=openai"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "vlm"], "--engine takes foretoken, vllm, openai; got 'vlm', did you mean"),
        (["--engine", "vllm"], "--engine vllm needs vLLM in this environment: install foretoken"),
        (
            ["--engine", "vllm", "--emulate", "h200-llama3-8b"],
            "give either --emulate or --engine vllm: each is an engine",
        ),
        (["--engine", "openia"], "openai; got 'openia', did you mean openai?"),
        (["--engine", "openai"], "--engine openai needs --backend URL, the address of an OpenAI-"),
        (["--backend", "http://a:1"], "--backend needs --engine openai (got --engine foret"),
        (
            [OPENAI, "--backend=ftp://a"],
            "--backend: 'ftp://a' is not the address of a server; give http://HOST:PORT or https",
        ),
        ([OPENAI, "--backend=http://a:99999"], "is not the address of a server"),
        ([OPENAI, "--backend=http://a b"], "is not the address of a server"),
        (
            [OPENAI, "--backend=http://user:pass@a"],
            "--backend: 'a' must be a plain address; a key is given by --backend-key",
        ),
        (
            [OPENAI, "--backend=a:1", "--backend=http://a:1/v1/"],
            "--backend http://a:1/v1/ is given twice",
        ),
        (["--backend-key=k"], "--backend-key needs --engine openai (got --engine foretoken)"),
        (["--set=backend.poll_s=1"], "backend.poll_s needs --engine openai (got --engine foretok"),
        (
            ["--engine=vllm", "--set=emulation.sigma=1"],
            "emulation.sigma needs --engine foretoken (got --engine vllm)",
        ),
        (
            [OPENAI, "--backend=a:1", "--workers=3"],
            "leave out --workers: there is one for each --backend, and 1 are given",
        ),
        (
            [OPENAI, "--backend=a:1", "--emulate=cpu2-demo"],
            "give either --emulate or --engine openai: each is an engine",
        ),
        (
            [OPENAI, "--backend=http://127.0.0.1:9", "--dtype=float32"],
            "worker.dtype has no effect with --engine openai, where another server computes",
        ),
        (
            [OPENAI, "--backend=http://127.0.0.1:9", "--set", "backend.poll_s=0"],
            "backend.poll_s: Input should be greater than 0",
        ),
    ],
)
def test_mistake_is_one_line_with_status_2(arguments: list[str], message: str) -> None:
    done = run("serve", "--http-port", "0", "--grpc-port", "0", *arguments)
    assert message in only_line(done)
    assert done.returncode == 2
