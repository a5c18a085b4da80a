"""Connection limits and timeouts of the HTTP listener, over plain sockets."""

import asyncio
import json
import resource
import socket
from typing import Any

import pytest

from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of

PING = b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
WAIT_S = 30.0  # of any answer; only a failing test takes it


class RawConnection:
    """A connection without an HTTP client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, harness: Harness) -> "RawConnection":
        host, port = harness.http_url.removeprefix("http://").split(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def ask(self, raw: bytes) -> tuple[int, dict[str, str], Any]:
        self.writer.write(raw)
        return await self.answer()

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, json.loads(body)

    async def end(self) -> bytes:
        """The rest, until the server closes the connection."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()

    def close(self) -> None:
        self.writer.close()


def check_error(answer: tuple[int, dict[str, str], Any]) -> tuple[int, str]:
    """Status and message of an error in OpenAI's format."""
    status, headers, body = answer
    assert headers["content-type"] == "application/json" and headers["x-request-id"]
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return status, body["error"]["message"]


@pytest.mark.parametrize("begun", [b"GET /ping HTTP/1.1\r\nhost: x", b"P"])
@pytest.mark.parametrize("before", [b"", PING])
async def test_incomplete_headers_time_out(before: bytes, begun: bytes) -> None:
    async with run_harness(header_wait_s=0.2) as harness:
        line = await RawConnection.to(harness)
        if before:
            assert (await line.ask(before))[0] == 200
        assert check_error(await line.ask(begun)) == (
            408,
            "the headers did not arrive within 0.2 s",
        )
        assert await line.end() == b""


@pytest.mark.parametrize("begin", [b"GET /ping HTTP/1.1\r\nx: ", POST], ids=["headers", "body"])
async def test_dripping_request_times_out(begin: bytes) -> None:
    async with run_harness(header_wait_s=0.3, max_body_s=0.3) as harness:
        line = await RawConnection.to(harness)

        async def drip() -> None:
            line.writer.write(begin)
            while True:
                line.writer.write(b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        assert (await line.answer())[0] == 408
        dripping.cancel()


async def test_silent_connection_is_closed_and_idle_one_stays() -> None:
    async with run_harness(header_wait_s=0.2) as harness:
        silent, idle = await RawConnection.to(harness), await RawConnection.to(harness)
        assert (await idle.ask(PING))[0] == 200
        assert await silent.end() == b""
        assert (await idle.ask(PING))[0] == 200  # idle longer than the header timeout
        idle.close()


async def test_idle_connection_is_closed_after_keep_alive() -> None:
    async with run_harness(keep_alive_s=1) as harness:
        line = await RawConnection.to(harness)
        assert (await line.ask(PING))[0] == 200
        assert await line.end() == b""


async def test_stalled_body_times_out() -> None:
    async with run_harness(body_wait_s=0.2) as harness:
        line = await RawConnection.to(harness)
        status, headers, body = await line.ask(POST + b'{"prompt"')
        assert (status, body["error"]["code"]) == (408, "body_too_slow")
        assert headers["connection"] == "close" and headers["x-request-id"]
        assert body["error"]["message"] == "the body arrived too slowly: 9 bytes before the timeout"
        assert await line.end() == b""


async def test_deadline_within_a_body_is_504() -> None:
    async with run_harness() as harness:
        line = await RawConnection.to(harness)
        timeout = b"content-length: 1000\r\nx-request-timeout-s: 0.2\r\n"
        begin = POST.replace(b"content-length: 1000\r\n", timeout)
        status, _, body = await line.ask(begin + b'{"prompt"')
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert body["error"]["message"] == "the deadline passes before the request is read"
        line.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/v1/embeddings"])
async def test_announced_body_above_the_limit_is_413_before_it_arrives(path: str) -> None:
    async with run_harness() as harness:
        line = await RawConnection.to(harness)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n"
        status, _, body = await line.ask(head.encode())
        assert (status, body["error"]["code"]) == (413, "body_too_large")
        line.close()


async def test_body_behind_an_error_answer_is_not_awaited() -> None:
    async with run_harness(header_wait_s=0.2) as harness:
        line = await RawConnection.to(harness)
        body = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\nsome of it"
        assert (await line.ask(body))[0] == 404
        assert await line.end() == b""


async def test_too_large_headers_are_431() -> None:
    async with run_harness(max_header_bytes=4096) as harness:
        line = await RawConnection.to(harness)
        fits = PING[:-2] + b"x: " + b"a" * 3000 + b"\r\n\r\n"
        assert (await line.ask(fits))[0] == 200
        status, message = check_error(await line.ask(PING[:-2] + b"x: " + b"a" * 5000))
        assert (status, message.startswith("Invalid HTTP request received")) == (431, True)
        assert await line.end() == b""


async def test_invalid_http_is_400() -> None:
    async with run_harness() as harness:
        for raw in (b"hello\r\n\r\n", b"GET /ping HTTP/1.1\r\nho st: x\r\n\r\n"):
            line = await RawConnection.to(harness)
            assert check_error(await line.ask(raw))[0] == 400
            assert await line.end() == b""


async def test_request_without_host_is_400() -> None:
    async with run_harness() as harness:
        line = await RawConnection.to(harness)
        status, message = check_error(await line.ask(b"GET /ping HTTP/1.1\r\n\r\n"))
        assert (status, message) == (
            400,
            "Invalid HTTP request received: the Host header is missing",
        )
        assert await line.end() == b""


async def test_large_trailers_of_a_body_are_refused() -> None:
    chunked = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b'{"prompt": "1"}'
    body_chunk = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    async with run_harness(max_header_bytes=4096) as harness:
        line = await RawConnection.to(harness)
        fits = chunked + body_chunk + b"host: y\r\n\r\n"  # a trailer has no effect
        assert (await line.ask(fits))[0] == 200
        line.writer.write(chunked + body_chunk)
        await line.writer.drain()
        await asyncio.sleep(0.05)
        status, message = check_error(await line.ask(b"x: " + b"a" * 5000))
        assert (status, message.startswith("Invalid HTTP request received")) == (431, True)
        assert await line.end() == b""


async def test_body_that_ends_behind_an_error_answer_keeps_the_connection() -> None:
    async with run_harness(header_wait_s=0.3) as harness:
        line = await RawConnection.to(harness)
        begin = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab"
        assert (await line.ask(begin))[0] == 404
        line.writer.write(b"cd")
        await asyncio.sleep(0.5)  # longer than the rest of the body may take
        assert (await line.ask(PING))[0] == 200
        line.close()


async def test_upgrade_to_another_protocol_is_ignored() -> None:
    """As Java's client offers with every request."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    body = b'{"prompt": "1"}'
    post = b"POST /tokenize HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n%b"
    async with run_harness() as harness:
        line = await RawConnection.to(harness)
        for _ in range(2):
            assert (await line.ask(post % (offer, len(body), body)))[0] == 200
        line.close()


async def test_client_that_pauses_reads_every_event_in_order() -> None:
    """The answers of many choices exceed the buffers of both sockets, so that events wait for the
    client."""
    choices, answer = 48, "1234567890" * 40
    fields = {"prompt": "1,", "stream": True, "max_tokens": 500, "n": choices}
    body = json.dumps(fields | {"request_id": "x" * 128}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    tokens = tokens_of(answer)
    async with run_harness(lambda _: tokens, max_messages_per_s=1e6) as harness:
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        narrow.setblocking(False)
        host, port = harness.http_url.removeprefix("http://").split(":")
        await asyncio.get_running_loop().sock_connect(narrow, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=narrow, limit=4_096)
        writer.write(head % len(body) + body)
        table = harness.gateway.sessions.table
        await harness.until(lambda: any(live.call.waits_for_client for live in table))
        received = bytearray()
        async with asyncio.timeout(WAIT_S):
            while not received.endswith(b"0\r\n\r\n"):
                received += await reader.read(65_536)
        writer.close()
    texts = dict.fromkeys(range(choices), "")
    for part in bytes(received).split(b"data: {")[1:]:
        [choice] = json.loads(b"{" + part.split(b"\n\n")[0])["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(choices), answer)


async def test_connection_above_the_limit_is_503() -> None:
    async with run_harness(max_connections=2) as harness:
        held = [await RawConnection.to(harness), await RawConnection.to(harness)]
        for line in held:
            assert (await line.ask(PING))[0] == 200
        over = await RawConnection.to(harness)
        status, headers, body = await over.ask(PING)
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert "too many connections" in body["error"]["message"] and headers["x-request-id"]
        assert await over.end() == b""
        assert (await held[0].ask(PING))[0] == 200
        held[0].close()

        async def comes_in() -> bool:
            line = await RawConnection.to(harness)
            answer = await line.ask(PING)
            line.close()
            return answer[0] == 200

        async with asyncio.timeout(WAIT_S):
            while not await comes_in():  # noqa: ASYNC110 - a test polls what has no event
                await asyncio.sleep(0.02)
        held[1].close()


async def test_connection_above_the_share_of_its_client_is_503() -> None:
    async with run_harness(max_client_connections=1) as harness:
        first = await RawConnection.to(harness)
        assert (await first.ask(PING))[0] == 200
        over = await RawConnection.to(harness)
        assert (await over.ask(PING))[0] == 503
        assert await over.end() == b""
        host, port = harness.http_url.removeprefix("http://").split(":")
        other = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
        assert (await RawConnection(*other).ask(PING))[0] == 200
        other[1].close()
        first.close()


async def test_client_that_reads_nothing_is_disconnected() -> None:
    async with run_harness(client_stall_s=0.2) as harness:
        line = await RawConnection.to(harness)
        asks = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 400
        line.writer.write(asks)
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(WAIT_S):
                while True:
                    line.writer.write(PING)
                    await line.writer.drain()
                    await asyncio.sleep(0.05)
        line.close()


@pytest.mark.parametrize("invalid", [False, True])
async def test_requests_of_one_connection_end_with_it(invalid: bool) -> None:
    async with run_harness(place=False) as harness:
        line = await RawConnection.to(harness)
        body = b'{"prompt": "1,"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
        line.writer.write((head % len(body) + body) * 2)
        await harness.until(lambda: bool(harness.scheduler.requests))
        if invalid:
            line.writer.write(b"no request\r\n\r\n")
        else:
            line.close()
        await harness.until(lambda: bool(harness.scheduler.cancels))
        await harness.until(lambda: not len(harness.gateway.sessions.table))
        line.close()


async def test_low_open_file_limit_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (900, before[1]))
    try:
        for connections in (900, 901):
            async with run_harness(max_connections=connections) as harness:
                assert (await harness.http("GET", "/ping")).status == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    [message] = [r.getMessage() for r in caplog.records if "may open" in r.getMessage()]
    assert message.startswith("the process may open 900 files")
    assert "max_connections=901" in message


async def test_disconnect_within_a_body_is_not_logged_as_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with run_harness(lambda _: tokens_of("1")) as harness:
        line = await RawConnection.to(harness)
        line.writer.write(POST + b"{")
        await line.writer.drain()
        line.close()
        await line.writer.wait_closed()
        reply = await harness.http("POST", "/v1/completions", {"prompt": "1,"})
        assert reply.status == 200
        await asyncio.sleep(0.1)
    assert not [each for each in caplog.records if each.exc_info]
