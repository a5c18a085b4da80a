"""Mutated requests end no server, log no traceback and get documented answers."""

import gc

import pytest

from tests.gateway.faces.http.fuzz import check, fuzz
from tests.gateway.gateway_fakes import run_harness, tokens_of

REQUESTS = 100_000


@pytest.fixture
def no_garbage() -> None:
    """Collects what earlier tests left before an event loop runs. A client of openai that is
    collected later starts a task in that loop, and the log has the failure of the task."""
    gc.collect()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("no_garbage")
async def test_mutated_requests_get_documented_answers(caplog: pytest.LogCaptureFixture) -> None:
    async with run_harness(lambda _: tokens_of("1")) as harness:
        host, port = harness.http_url.removeprefix("http://").split(":")
        statuses = await fuzz(host, int(port), REQUESTS)
        await harness.until(lambda: not harness.gateway.arriving)  # all clients have left
        reply = await harness.http("POST", "/v1/completions", {"prompt": "1,", "max_tokens": 1})
        assert reply.status == 200
        await harness.until(lambda: not len(harness.gateway.sessions.table))
    check(statuses)
    assert statuses[200] and statuses[400]
    assert not [each.getMessage() for each in caplog.records if each.exc_info]
