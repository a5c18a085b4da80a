"""`foretoken why` on a real system: from the server, and from its event log afterwards."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from foretoken import Client
from tests.live import ROOT, command, environment, serving

LONG = "Count from 1 to 150.\n"  # runs longer than the forecast timeout


def why(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("why", *arguments),
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        cwd=ROOT,
    )


def sentences(text: str) -> list[str]:
    """The lines of a story without their times."""
    return [line[14:] for line in text.splitlines() if line.startswith("  ")]


def chat(http: str, **body: Any) -> str:
    content = {"messages": [{"role": "user", "content": "Count from 1 to 9."}], **body}
    headers = {"content-type": "application/json"}
    request = Request(f"{http}/v1/chat/completions", json.dumps(content).encode(), headers)
    answer: dict[str, str] = json.load(urlopen(request, timeout=60))
    return answer["id"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--separate"]])
def test_why_from_server_equals_why_from_log(tmp_path: Path, mode: list[str]) -> None:
    log = tmp_path / "events.jsonl"
    settings = ["--kv-tokens", "512", "--set", f"scheduler.event_log={log}", *mode]
    with serving(*settings) as live:
        with Client(live.grpc) as client:
            own = client.complete(LONG, max_tokens=160, sla={"ttft_s": 1e-6}).request_id
        both = chat(live.http, n=2, max_tokens=20)
        assert both.startswith("chatcmpl-")
        reported, two = why(own, "--server", live.grpc), why(both, "--server", live.grpc)
        short = why(own[:12], "--server", live.grpc)
        over_http = why(own, "--server", live.http)
        lost = why("nosuchid", "--server", live.grpc)
        assert live.stop() == 0
    assert reported.returncode == 0
    assert reported.stdout == short.stdout == over_http.stdout
    assert reported.stdout.splitlines()[0] == f"{own}-0, ended; times in seconds since its arrival"
    message = sentences(reported.stdout)
    # The time in the gateway is a separate line only where it is long enough to print.
    arrived = message[message[0].startswith("received by the gateway; ")]
    assert arrived.startswith("arrived with ") and "SLA custom (TTFT 1e-06 s)" in arrived
    assert any(each.startswith("forecast by ") for each in message)
    # The budget depends on whether the forecast arrives before the admission.
    admitted = r"admitted at worker-0, budget \d+ output tokens: forecast peak \d+ KV tokens of 512"
    assert any(re.match(admitted, each) for each in message)
    [judged] = [
        each for each in message if each.startswith("as its client saw it, SLA custom missed (")
    ]
    assert any(each.startswith("ended (") for each in message[-2:]) and judged in message[-2:]
    times = [float(line.split()[0]) for line in reported.stdout.splitlines()[1:]]
    assert times == sorted(times)
    call = both.removeprefix("chatcmpl-")
    heads = [line for line in two.stdout.splitlines() if not line.startswith(" ")]
    assert heads == [f"{call}-{n}, ended; times in seconds since its arrival" for n in (0, 1)]
    assert lost.returncode == 1
    assert lost.stderr.startswith("foretoken why: no request 'nosuchid' is remembered: 0 are live")
    replayed = why(own, "--log", str(log))
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout.startswith("preset foretoken, ")
    *replayed_story, verdict = sentences(replayed.stdout)
    assert replayed_story == [each for each in message if each != judged]
    by_reports = "by its worker's reports, without delivery to the client, SLA custom missed ("
    assert verdict.startswith(by_reports)
