"""The official `openai` client against a real system; gRPC reflection and health."""

from collections.abc import Iterator

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from services.runtime.healthcheck import check
from tests.gateway.faces.http.openai_checks import CHECKS, Check
from tests.live import MODES, Live, serving


@pytest.fixture(scope="module", params=MODES)
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    with serving(*MODES[request.param]) as system:
        yield system


@pytest.mark.slow
@pytest.mark.parametrize("openai_check", CHECKS, ids=lambda check: check.__name__)
async def test_openai_client_works_with_a_live_server(live: Live, openai_check: Check):
    await openai_check(live.http)


@pytest.mark.slow
def test_grpc_server_answers_reflection_and_health_checks(live: Live):
    assert check(live.grpc) == "SERVING"
    with grpc.insecure_channel(live.grpc) as channel:
        names = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"foretoken.v1.Gateway", "grpc.health.v1.Health"} <= set(names)
