"""The audit log of a gateway: a line for each answered and each refused request."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.admission.audit_log import AuditLog
from gateway.admission.caller import Caller
from gateway.config import GatewayConfig
from gateway.types.api_keys import name_keys
from gateway.types.key_limits import KeyLimits
from services.runtime.config import ConfigError
from tests.gateway.gateway_fakes import Harness, Reply, run_harness, tokens_of

LIMITED, FREE = "sk-limited-0123456789", "sk-free-0123456789"
LIMITED_NAME, FREE_NAME = (each.name for each in name_keys([LIMITED, FREE]))


async def complete(harness: Harness, key: str, request_id: str, **body: object) -> Reply:
    headers = {"authorization": f"Bearer {key}", "x-request-id": request_id}
    return await harness.http("POST", "/v1/completions", {"prompt": "1,"} | body, headers)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


async def test_requests_and_their_ends_are_recorded(tmp_path: Path) -> None:
    keyed = {LIMITED_NAME: KeyLimits(requests_per_minute=1)}
    made = run_harness(
        lambda _: tokens_of("123"), api_keys=(LIMITED, FREE), key_limits=keyed,
        audit_folder=str(tmp_path / "audit"), gateway_id="a/b",
    )  # fmt: skip
    began = datetime.now(UTC)
    async with made as harness:
        answered = await complete(harness, LIMITED, "one", max_tokens=5, n=2)
        refused = await complete(harness, LIMITED, "two", sla_class="batch")
        invalid = await complete(harness, FREE, "three", max_tokens=-1)
        streamed = await complete(harness, FREE, "four", max_tokens=2, stream=True)
    asked = [request.key_name for request in harness.scheduler.requests]
    assert asked == [LIMITED_NAME, LIMITED_NAME, FREE_NAME]  # never the key
    statuses = [reply.status for reply in (answered, refused, invalid, streamed)]
    assert statuses == [200, 429, 400, 200]
    found = lines(tmp_path / "audit" / "a%2Fb.jsonl")
    times = [datetime.fromisoformat(line.pop("time")) for line in found]
    assert began.replace(microsecond=0) <= min(times) <= max(times) <= datetime.now(UTC)
    ids = [line.pop("id", "") for line in found]
    assert [bool(each) for each in ids] == [True, False, True]
    tokens = answered.json["usage"]
    assert found == [
        {"key": LIMITED_NAME, "request_id": "one", "model": "demo", "sla_class": "standard",
         "prompt_tokens": tokens["prompt_tokens"], "cached_tokens": 0,
         "completion_tokens": tokens["completion_tokens"], "outcomes": ["stop", "stop"]},
        {"key": LIMITED_NAME, "request_id": "two", "model": "demo", "sla_class": "",
         "refused": "key_requests"},
        {"key": FREE_NAME, "request_id": "four", "model": "demo", "sla_class": "standard",
         "prompt_tokens": tokens["prompt_tokens"], "cached_tokens": 0, "completion_tokens": 2,
         "outcomes": ["length"]},
    ]  # fmt: skip


def opened(folder: Path, **sizes: int) -> AuditLog:
    settings: dict[str, Any] = {"audit_folder": str(folder), **sizes}
    log = AuditLog.open(GatewayConfig(scheduler_address="127.0.0.1:1", **settings))
    assert log is not None
    return log


def test_oldest_file_is_deleted(tmp_path: Path) -> None:
    log = opened(tmp_path, audit_file_mb=1, audit_files=2)
    for number in range(25):
        log.write(Caller(str(number)), {"filler": "x" * 200_000})
    log.close()
    newest, older = (tmp_path / name for name in ("gateway.jsonl", "gateway.jsonl.1"))
    assert {*tmp_path.iterdir()} == {newest, older}
    kept = [int(line["request_id"]) for file in (older, newest) for line in lines(file)]
    assert kept == [*range(kept[0], 25)]
    assert max(file.stat().st_size for file in (newest, older)) <= 1_000_000


def test_a_restart_appends(tmp_path: Path) -> None:
    for name in ("one", "two"):
        log = opened(tmp_path)
        log.write(Caller(name), {})
        log.close()
    assert [line["request_id"] for line in lines(tmp_path / "gateway.jsonl")] == ["one", "two"]


def test_full_disk_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    log = AuditLog(Path("/dev/full"), 1_000, 2)
    log.write(Caller("one"), {})
    log.close()
    assert "the audit log loses lines: cannot write to /dev/full" in caplog.text


async def test_folder_that_cannot_be_made_prevents_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"gateway.audit_folder: .*file/.*: Not a directory"):
        async with asyncio.timeout(30), run_harness(audit_folder=f"{tmp_path}/file/audit"):
            pass
