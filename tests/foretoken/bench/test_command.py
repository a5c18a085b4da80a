"""`foretoken bench` from the command line: against a live foretoken, and interrupted by Ctrl-C."""

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.foretoken.bench.openai_fake import ScriptedAnswer, fake_server
from tests.live import ROOT, Live, command, environment, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving("--served-model-name", "demo", "--set", "log.path=") as running:
        yield running


def bench(*arguments: str) -> str:
    done = subprocess.run(
        command("bench", *arguments),
        capture_output=True, text=True, timeout=120, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # a progress bar needs a terminal
    return " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_bench_measures_a_live_server(live: Live, tmp_path: Path, protocol: str) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    reported = bench(
        live.http if protocol == "http" else live.grpc,
        "--requests", "12", "--concurrency", "4", "--max-tokens", "16",
        "--as-class", "interactive", "--json", str(out), "--plot", str(picture),
    )  # fmt: skip
    assert (
        "the demo model's tasks" in reported
        and "12 of 12" in reported
        and "goodput, interactive" in reported
    )
    [server] = json.loads(out.read_text())["servers"]
    [measured] = server["rounds"]
    assert (measured["completed"], measured["errors"], measured["has_usage"]) == (12, {}, True)
    assert 1 <= measured["peak_concurrency"] <= 4
    for sample in measured["samples"]:
        assert 0 < sample["ttft_s"] <= sample["e2e_s"]
        assert 1 <= sample["output_tokens"] <= 16 and sample["prompt_tokens"] > 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_sends_random_words_of_the_requested_length(live: Live, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    reported = bench(
        live.http, "--endpoint", "completions", "--input-tokens", "40", "--output-tokens", "3",
        "--rate", "50", "--requests", "10", "--json", str(out),
    )  # fmt: skip
    assert "open loop, 50 requests/s, poisson" in reported and "server tokens" in reported
    [measured] = json.loads(out.read_text())["servers"][0]["rounds"]
    assert {s["output_tokens"] for s in measured["samples"]} == {3}
    assert all(38 <= s["prompt_tokens"] <= 42 for s in measured["samples"])


def test_bench_compares_two_servers(live: Live) -> None:
    reported = bench(
        "--compare", live.http, f"{live.http}/v1", "--requests", "3", "--rounds", "2",
        "--max-tokens", "4", "--warm-up", "1",
    )  # fmt: skip
    assert "second / first" in reported and "2 round(s)" in reported


async def test_ctrl_c_reports_partial_results() -> None:
    async with fake_server(
        lambda _: ScriptedAnswer(pause_s=0.001 if len(fake.requests) < 30 else 60)
    ) as fake:
        process = await asyncio.create_subprocess_exec(
            *command("bench", fake.url, "--requests", "1000", "--concurrency", "2"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=ROOT,
        )  # fmt: skip

        async def wait_for_requests() -> None:
            while len(fake.requests) < 30:  # noqa: ASYNC110 - polls the fake server
                await asyncio.sleep(0.01)

        async with asyncio.timeout(60):
            await wait_for_requests()
            process.send_signal(signal.SIGINT)
            out, errors = await process.communicate()
    assert process.returncode == 130
    reported = " ".join(out.decode().split())
    assert "stopped after" in reported and "of 1000 requests" in reported and "TTFT" in reported
    assert errors == b""


def test_rate_sweep_prints_a_row_per_rate_in_ascending_order(live: Live, tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    printed = bench(
        "--server", live.http, "--rate", "40,20", "--requests", "4", "--warm-up", "1",
        "--max-tokens", "4", "--as-class", "interactive,standard", "--json", str(out),
    )  # fmt: skip
    assert "requests/s offered" in printed and "goodput, interactive" in printed
    rates = json.loads(out.read_text())["rates"]
    assert [each["load"]["rate"] for each in rates] == [20, 40]
    for each in rates:
        samples = each["servers"][0]["rounds"][0]["samples"]
        assert [s["sla_class"] for s in samples] == ["interactive", "standard"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "5,x"), "--rate takes requests per second, as 5 or 5,10,20; got '5,x'"),
        (("--rate", "0"), "--rate takes requests per second"),
        (("--as-class", "interactiv"), "did you mean interactive?"),
        (("--rate", "5", "--concurrency", "2"), "set one"),
    ],
)
def test_bench_rejects_a_wrong_load_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        command("bench", "http://127.0.0.1:1", *arguments),
        capture_output=True, text=True, env=environment(), cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1
