"""Processes of a system killed under load: every answer is right, and each is replaced."""

import asyncio
import signal
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from foretoken import AsyncClient
from foretoken.client.errors import ForetokenError
from foretoken.running.certificates import ALL, make_certificates
from tests.live import Live, wait_for
from tests.system.faults.killed_processes import (
    PROMPTS,
    TOKENS,
    answer,
    answers,
    check_answers_while,
    kill_process,
    two_workers,
    wait_for_output,
)


def answers_health(live: Live) -> bool:
    try:
        with urllib.request.urlopen(f"{live.http}/health", timeout=10) as health:
            return bool(health.status == 200)
    except OSError:
        return False


@pytest.mark.slow
async def test_answers_survive_the_loss_of_a_worker_and_the_predictor(tmp_path: Path) -> None:
    with two_workers(tmp_path, "--gateways=0") as (live, output):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)
            assert await answer(client, PROMPTS[2], TOKENS) != expected[2], "without the adapter"

        async def kill_both() -> None:
            await kill_process(live, "worker")
            await kill_process(live, "predictor")

        assert await check_answers_while(live, expected, kill_both) > 0
        assert live.stop() == 0
    assert "Traceback" not in output.read_text()


@pytest.mark.slow
async def test_server_restarts_all_children(tmp_path: Path) -> None:
    with two_workers(tmp_path, "--gateways=1") as (live, output):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)

        async def kill_all() -> None:
            await kill_process(live, "worker")
            await wait_for_output(output, "is back after")
            await kill_process(live, "worker")  # the other, or the same again
            await wait_for_output(output, "is back after", 2)
            await kill_process(live, "predictor")
            await wait_for_output(output, "predictor is back after")
            await kill_process(live, "scheduling")
            await wait_for_output(output, "scheduler is back after")

        assert await check_answers_while(live, expected, kill_all) > 0
        assert live.stop() == 0
    assert "Traceback" not in output.read_text()


def change_certificates(folder: Path) -> None:
    """Certificates of an authority that is new each time."""
    for file in list(folder.iterdir()):
        file.unlink()
    make_certificates(folder, 1)


def change_token(folder: Path) -> None:
    """A token that is new each time, before the earlier ones."""
    file = folder / "token"
    earlier = file.read_text() if file.exists() else ""
    new = folder / "new"
    new.touch(0o600)
    new.write_text(f"{len(earlier):064}\n{earlier}")
    new.replace(file)


CERTIFICATES = {"cert": f"{ALL}.pem", "key": f"{ALL}.key", "ca": "ca.pem"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "change", "files"),
    [
        *((each, change_certificates, CERTIFICATES) for each in ("worker", "predictor", "batcher")),
        *((each, change_token, {"token_file": "token"}) for each in ("scheduler", "estimator")),
    ],
)
async def test_separate_server_restarts_every_child(
    tmp_path: Path, section: str, change: Callable[[Path], None], files: Mapping[str, str]
) -> None:
    """With an identity, and the process that returns has a new one."""
    (folder := tmp_path / "identity").mkdir()
    change(folder)
    tls = [word for key, name in files.items() for word in ("--set", f"tls.{key}={folder / name}")]
    with two_workers(tmp_path, "--separate", *tls) as (live, output):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)

        async def kill_one() -> None:
            change(folder)
            await kill_process(live, section)
            await wait_for_output(output, "is back after")

        assert await check_answers_while(live, expected, kill_one) > 0
        assert live.stop() == 0
    assert "Traceback" not in output.read_text()


@pytest.mark.slow
async def test_connections_recover_from_a_gateway_restart(tmp_path: Path) -> None:
    with two_workers(tmp_path, "--separate") as (live, output):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)
            cut = asyncio.ensure_future(answers(client, 1_500))  # seconds
            await asyncio.sleep(0.2)
            await kill_process(live, "gateway")
            with pytest.raises(ForetokenError):
                await cut
        await wait_for_output(output, "gateway is back after")
        await asyncio.to_thread(wait_for, lambda: answers_health(live))  # then it knows adapters
        async with AsyncClient(live.grpc) as client:
            assert await answers(client) == expected
        assert live.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "arguments"),
    [
        ("worker", ("--gateways=0",)),
        ("scheduling", ("--gateways=1",)),
        ("scheduler", ("--separate",)),
    ],
)
async def test_sigterm_of_a_child_loses_no_request(
    tmp_path: Path, section: str, arguments: tuple[str, ...]
) -> None:
    with two_workers(tmp_path, *arguments) as (live, output):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)

        async def kill_one() -> None:
            await kill_process(live, section, signal.SIGTERM)
            await wait_for_output(output, "is back after")

        assert await check_answers_while(live, expected, kill_one) > 0
        assert live.stop() == 0
    assert "stopping with unfinished requests" not in output.read_text()
