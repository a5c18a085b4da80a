"""Parsing of HTTP responses and events does not depend on how their bytes are split."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.network.wire import AnswerReader, EventReader, WireError

BODIES = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def split(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def read(pieces: list[bytes]) -> tuple[AnswerReader, bytes]:
    body = bytearray()
    reader = AnswerReader(body.extend)
    for piece in pieces:
        reader.feed(piece)
    return reader, bytes(body)


@given(BODIES, st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_answer_reader_joins_chunks_at_any_split(
    chunks: list[bytes], places: list[int], trailer: bool
) -> None:
    wire = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for chunk in chunks:
        wire += f"{len(chunk):X};x=1\r\n".encode() + chunk + b"\r\n"
    wire += b"0\r\n" + (b"X-Trailer: 1\r\n" if trailer else b"") + b"\r\n"
    reader, body = read(split(wire, places))
    assert (reader.status, reader.done, reader.reusable, body) == (
        200,
        True,
        True,
        b"".join(chunks),
    )
    reader, _ = read([wire[:-1]])
    assert not reader.done


@given(st.binary(max_size=60), st.lists(st.integers(0, 10_000), max_size=8))
def test_answer_reader_ends_at_content_length(content: bytes, places: list[int]) -> None:
    head = f"HTTP/1.1 404 Not Found\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    reader, body = read(split(head + content, places))
    assert (reader.status, reader.done, body) == (404, True, content)


def test_answer_reader_ends_with_the_connection() -> None:
    reader, body = read([b"HTTP/1.0 200 OK\r\n\r\nab", b"cd"])
    assert not reader.done
    reader.end()
    assert reader.done and body == b"abcd"
    reader, _ = read([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 1\r\n\r\nx"])
    assert reader.done and not reader.reusable


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000,
    ],
)
def test_answer_reader_rejects_other_protocols(wire: bytes) -> None:
    with pytest.raises(WireError):
        read([wire])


DATA = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)


@given(st.lists(DATA, max_size=6), st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(0, 999)))
def test_event_reader_is_independent_of_splits(
    texts: list[str], feed: str, places: list[int]
) -> None:
    wire = "".join(f"event: x{feed}data: {text}{feed}{feed}: note{feed}{feed}" for text in texts)
    reader = EventReader()
    found = [event for piece in split(wire.encode(), places) for event in reader.feed(piece)]
    assert found == [text.encode().strip() for text in texts]


def test_event_reader_joins_data_lines() -> None:
    assert EventReader().feed(b"data: a\ndata:b\n\ndata:c\n\n") == [b"a\nb", b"c"]
