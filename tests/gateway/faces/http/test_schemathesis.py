"""Requests that schemathesis makes of the OpenAPI description get the answers that it describes."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.gateway.gateway_fakes import run_harness, tokens_of

CONFIG = Path(__file__).with_name("schemathesis.toml")


@pytest.mark.slow
async def test_answers_match_the_description(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path / "batches")
    async with run_harness(
        lambda _: tokens_of("1"), batch_folder=folder, adapter_loading=True
    ) as harness:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG)),
            *("run", f"{harness.http_url}/openapi.json"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        await harness.until(lambda: not len(harness.gateway.sessions.table))
    assert not [each.getMessage() for each in caplog.records if each.exc_info]
