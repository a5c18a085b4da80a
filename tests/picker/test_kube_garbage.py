"""What the picker does with answers of Kubernetes' API, and a token, that it cannot use."""

from pathlib import Path

import pytest

from services.picker.links.kube.api import MAX_BYTES
from tests.picker.kube_server import PODS
from tests.picker.test_kube import LABELS, filled, following, pod, until_endpoints
from tests.reach import until


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (b"<html>", "its answer is no JSON object"),
        (b'{"items": [3], "metadata": {"resourceVersion": "1"}}', "an object does not have the"),
        (b'{"items": []}', "its answer is no list of objects"),
        (b" " * (MAX_BYTES + 1), "an answer is longer than 16 MiB"),
    ],
)
async def test_garbage_in_place_of_a_list_is_reported(
    caplog: pytest.LogCaptureFixture, sent: bytes, sentence: str
) -> None:
    server = filled()
    server.garbage[PODS] = sent
    async with server.serving() as url, following(url) as source:
        await until(lambda: f"(pods): {sentence}" in caplog.text)
        server.garbage.clear()
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")


async def test_an_object_that_cannot_be_read_keeps_the_endpoints(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = filled()
    async with server.serving() as url, following(url) as source:
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")
        server.put(PODS, "a", {"metadata": {"labels": LABELS}, "status": "odd"})
        await until(lambda: "(pods): an object does not have the fields" in caplog.text)
        assert source.endpoints == ("10.0.0.1:8000", "10.0.0.2:8000")
        server.put(PODS, "a", pod("10.0.0.9"))
        await until_endpoints(source, "10.0.0.2:8000", "10.0.0.9:8000")


async def test_a_file_without_a_token_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, token = filled(), tmp_path / "token"
    token.write_bytes(b"se\ncret")
    async with server.serving() as url, following(url, token_file=str(token)) as source:
        await until(lambda: f"(InferencePool): {token} holds no token" in caplog.text)
        token.write_text("own")
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")
    assert "cret" not in caplog.text
