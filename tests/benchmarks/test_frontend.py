"""The benchmark of the front end: its load, its accounts of CPU time, and its streaming client."""

import asyncio
import json
import os
import subprocess
import sys
from array import array
from collections.abc import Iterator

import pytest

from benchmarks.frontend.load import answer_lengths, fixed_load, send
from benchmarks.frontend.stream_client import Arrivals, StreamingConnection, added_latency_s
from benchmarks.harness.cpu import LOOP, descendants, read_cpu, role_of, spent
from foretoken.client.address import HttpAddress
from tests.live import serving

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_lengths_have_the_mean_and_every_load_the_same_ones():
    assert sum(answer_lengths(514)) / 514 == pytest.approx(67, rel=0.02)
    assert answer_lengths(3) == [15, 41, 107]  # 40.6 · e^(-0.967, 0, 0.967)
    lengths = [
        sorted(json.loads(request.body)["max_tokens"] for request in fixed_load(20, 25.0, seed))
        for seed in (1, 2)
    ]
    assert lengths == [answer_lengths(20)] * 2


@pytest.mark.slow
def test_load_is_answered_with_exactly_its_tokens():
    load = fixed_load(6, 100.0, seed=1)
    with serving() as live:
        received = asyncio.run(send(live.http, load, 60.0))
    assert (received.requests, received.tokens) == (6, sum(answer_lengths(6)))
    assert 6 <= received.events <= received.tokens and len(received.ttft_s) == 6


def test_cpu_is_attributed_to_the_process_and_its_children_by_role():
    """The child names itself a predictor and computes until it is stopped."""
    command = [sys.executable, "-c", "while True: pass", "services.predictor"]
    with subprocess.Popen(command) as child:
        try:
            assert child.pid in descendants(os.getpid())
            while role_of(child.pid) != "predictor":
                pass  # before its exec it is a copy of this process
            before = read_cpu(os.getpid(), "serve")
            while (used := spent(before, read_cpu(os.getpid(), "serve")))["predictor"] < 0.05:
                pass
        finally:
            child.kill()
    assert used["predictor"] >= 0.05
    assert 0 <= used[LOOP] <= used["serve"] + 0.05  # read one after the other, in ticks of 10 ms
    assert spent({"a": 1.0}, {"a": 3.0, "b": 5.0}) == {"a": 2.0}


def test_added_latency_matches_a_hand_worked_answer():
    """Steps of 10 ms. Token 1 arrives at 1.000, 2 and 3 together at 1.021, 4 at 1.030: they were
    made at 0.990 + 10 ms · n before the least delay, which is that of 1 and of 4."""
    arrivals = Arrivals(array("d", [1.0, 1.021, 1.030]), array("l", [1, 3, 4]))
    assert added_latency_s(arrivals, 0.01) == pytest.approx([0, 0.011, 0.001, 0])
    assert added_latency_s(Arrivals(), 0.01) == []


async def test_streaming_client_counts_words_and_repeats_its_request():
    """Events are cut anywhere between two reads."""
    events = [b'{"content": " one two"}', b'{"content": ""}', b'{"content": " three"}', b"[DONE]"]
    chunks = [b"data: %b\n\n" % event for event in events]
    raw = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(100):
            requests.append(request)
            for at in range(0, len(raw), 7):
                writer.write(raw[at : at + 7])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    bodies: Iterator[bytes] = iter([b"first", b"second"])
    answers: list[list[int]] = []

    def on_answer(arrivals: Arrivals) -> None:
        answers.append(list(arrivals.tokens))
        if len(answers) == 2:
            connection.stop()

    url = HttpAddress.parse(f"http://127.0.0.1:{port}")
    connection = await StreamingConnection.open(url, lambda: next(bodies), on_answer)
    await connection.ended
    assert requests == [b"first", b"second"]
    assert (answers, connection.tokens, connection.events) == ([[2, 3]] * 2, 6, 4)
    server.close()


async def test_streaming_client_reports_a_refusal():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\n")

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    url = HttpAddress.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    connection = await StreamingConnection.open(url, lambda: b"x", lambda _: None)
    with pytest.raises(RuntimeError, match=r"a stream failed: HTTP/1.1 429 Too Many"):
        await connection.ended
    server.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--parts", "load,all"), "--parts takes load and limit, got all"),
        (("--streams", "8,x"), "--streams takes numbers above 0, got 8,x"),
        (("--gateways", "1,-1"), "--gateways takes numbers, got 1,-1"),
        (("--rounds", "0"), "--rounds takes a number above 0, got 0"),
        (("--against", "/none"), "--against takes a folder with the project, got /none"),
        (("--peer-python", "/none"), "--peer-python takes a Python, got /none"),
    ],
)
def test_invalid_option_is_a_sentence(
    arguments: tuple[str, str], sentence: str, monkeypatch: pytest.MonkeyPatch
):
    from benchmarks.frontend.__main__ import main

    monkeypatch.setattr(sys, "argv", ["benchmarks.frontend", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert str(ended.value) == sentence


@pytest.mark.slow
def test_quick_run_writes_all_figures(tmp_path):
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.frontend", "--quick", "--streams", "8"]
    command += ["--gateways", "0,2"]
    subprocess.run([*command, "--json", str(file)], check=True, timeout=280)
    figures = json.loads(file.read_text())
    assert figures["load"]["embedded"]["serve: µs/token"] > 0
    load = figures["load"]["serve"]
    parts = ("gateway", "scheduler", "supervisor")
    total = sum(load[f"{part}: µs/request"] for part in parts)
    assert load["front end: µs/request"] == pytest.approx(total)
    for limit in (figures["limit"][f"gateways {count}"]["8"] for count in (0, 2)):
        assert 0 < limit["tok_s"] < 900 and limit["tokens_per_event"] >= 1
    assert figures["limit"]["gateways 2"]["8"]["scheduler_cpu"] > 0
