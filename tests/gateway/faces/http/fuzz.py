"""Byte mutations of HTTP requests, over raw sockets, against a server.

    python -m tests.gateway.faces.http.fuzz http://127.0.0.1:8000 1000000

Prints how many answers had each status, and the requests per second. Ends with an error for a
status that is not documented.
"""

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

WAIT_S = 60.0  # for the end of a connection; only a failing run takes it
QUIET_S = 0.3  # without an answer: the server waits for more of a request
LAST = b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
DOCUMENTED = frozenset((100, 200, 307, 400, 401, 404, 405, 408, 413, 415, 422, 429, 431, 503, 504))
CONNECTIONS = 64  # at a time; most of them wait QUIET_S
BODIES: tuple[tuple[str, object], ...] = (
    ("/v1/completions", {"prompt": "1,2", "max_tokens": 1, "stop": ["x"], "logprobs": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 1, "store": False}),
    ("/tokenize", {"prompt": "a\\u00e9\\n"}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)
PIECES = (
    b"\r\n", b"\n", b"\0", b"\xff", b":", b" ", b"{", b"}", b"[", b'"', b"\\ud800", b"null", b"-1",
    b"1e999", b"NaN", b"99999999999", b"0\r\n\r\n", b"content-length: 3\r\n",
    b"transfer-encoding: chunked\r\n", b"expect: 100-continue\r\n", b"upgrade: h2c\r\n",
    b"connection: close\r\n", b"x-request-timeout-s: 1e-9\r\n", b"x-foretoken-sla: a,b=c\r\n",
)  # fmt: skip


def requests(rng: random.Random) -> Iterator[bytes]:
    """Endless requests, of which most are mutated; some of the others are valid."""
    while True:
        path, content = rng.choice(BODIES)
        body = json.dumps(content).encode()
        if rng.random() < 0.5:
            body = mutate(rng, body)
        framing = b"content-length: %d\r\n\r\n%b" % (len(body), body)
        if rng.random() < 0.3:
            at = rng.randrange(len(body) + 1)
            chunks = [part for part in (body[:at], body[at:]) if part]
            framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in chunks)
            framing = b"transfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % framed
        raw = b"POST %b HTTP/1.1\r\nhost: x\r\n%b" % (path.encode(), framing)
        yield mutate(rng, raw) if rng.random() < 0.6 else raw


def mutate(rng: random.Random, raw: bytes) -> bytes:
    """`raw` with a few bytes replaced, removed, repeated or inserted."""
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        until = min(len(changed), at + rng.choice((0, 1, 1, 4, 30)))
        new = rng.choice((b"", bytes([rng.randrange(256)]), rng.choice(PIECES), raw[at:until] * 2))
        changed[at:until] = new
    return bytes(changed)


async def fuzz(host: str, port: int, count: int, seed: int = 0) -> Counter[int]:
    """Sends `count` requests, a few on each connection. The number of answers by status. Raises
    TimeoutError if the server neither answers nor closes a connection."""
    groups, statuses = _groups(count, random.Random(seed)), Counter[int]()

    async def send_groups() -> None:
        for group in groups:  # shared: each group is sent once
            statuses.update(await _send(host, port, group))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(send_groups())
    return statuses


def _groups(count: int, rng: random.Random) -> Iterator[list[bytes]]:
    stream = requests(rng)
    while count > 0:
        size = min(count, rng.randint(1, 3))
        yield [next(stream) for _ in range(size)]
        count -= size


async def _send(host: str, port: int, group: list[bytes]) -> list[int]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"".join((*group, LAST)))
        received = await _read_until_quiet(reader)
        if not reader.at_eof():
            writer.write_eof()  # ends the wait for what a mutation announces
        async with asyncio.timeout(WAIT_S):
            received += await reader.read()
    except TimeoutError:
        raise
    except OSError:  # the server closes the connection meanwhile
        return []
    finally:
        writer.close()
    return [int(status) for status in STATUS.findall(received)]


async def _read_until_quiet(reader: asyncio.StreamReader) -> bytes:
    received = bytearray()
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(QUIET_S):
                piece = await reader.read(65_536)
            if not piece:
                break
            received += piece
    return bytes(received)


def check(statuses: Counter[int]) -> None:
    """Raises AssertionError for a status that is not documented."""
    unknown = {status: number for status, number in statuses.items() if status not in DOCUMENTED}
    assert not unknown, f"undocumented statuses: {unknown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="http://HOST:PORT of a server")
    parser.add_argument("count", type=int, help="number of requests")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    host, port = options.url.removeprefix("http://").split(":")
    began_s = time.monotonic()
    statuses = asyncio.run(fuzz(host, int(port), options.count, options.seed))
    per_s = options.count / (time.monotonic() - began_s)
    print(dict(sorted(statuses.items())), f"{per_s:.0f} requests/s")
    check(statuses)


if __name__ == "__main__":
    main()
