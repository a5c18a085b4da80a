"""One scrape covers every process, and its counts match the clients' measurements."""

import json
import re
import urllib.request
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foretoken import Client
from foretoken.running.embedded import embedded
from foretoken.running.options import ServeOptions
from observability.metrics import gateway as catalogue
from services.runtime.server import Lifecycle
from tests.gateway.measuring import CLASSES, Pace, check_counts
from tests.live import MODES, serving, wait_for

SERVICES = {
    "embedded": ("scheduler", "estimator", "predictor"),
    "gateways": ("scheduler", "estimator", "predictor"),
    "separate": ("scheduler", "estimator", "predictor", "batcher"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", SERVICES)
def test_one_scrape_covers_every_process(mode: str) -> None:
    names = ("gateway-0", "gateway-1") if mode == "gateways" else ("",)
    labels = ['model_name="demo"' + f',gateway="{name}"' * bool(name) for name in names]
    with serving("--workers", "2", "--set", "gateway.vllm_metrics=on", *MODES[mode]) as live:

        def read() -> str:
            text: bytes = urllib.request.urlopen(f"{live.http}/metrics", timeout=30).read()
            return text.decode()

        with Client(live.grpc) as client:
            for _ in range(4):
                client.complete("Count from 1 to 9.\n", max_tokens=9)
        reported: list[str] = []

        def complete() -> bool:  # the low-priority predictor may answer late
            reported.append(read())
            found = [f"foretoken_metrics_peers_missing{{{each}}} 0.0" for each in labels]
            return all(each in reported[-1] for each in found)

        wait_for(complete, 60)
        text = reported[-1]
    seen: dict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            seen[sample.labels.get("worker", "")].add(sample.name)
            if "worker" in sample.labels and sample.name.startswith("foretoken_worker_"):
                assert sample.labels["model_name"] == "demo"
    for service in SERVICES[mode]:
        assert any(name.startswith(f"foretoken_{service}_") for name in seen[""]), service
    assert {"worker-0", "worker-1"} <= seen.keys()
    for worker in ("worker-0", "worker-1"):
        assert "foretoken_kv_cache_usage_perc" in seen[worker]
        assert "vllm:kv_cache_usage_perc" in seen[worker]
    assert "vllm:time_to_first_token_seconds_bucket" in seen[""]
    heads = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    assert len(heads) == len(dict(heads))
    expected = {metric.family: metric.kind.value for metric in catalogue.ALL}
    assert expected.items() <= dict(heads).items()
    assert "_created" not in text
    for each in labels:
        assert f'foretoken_sla_requests_total{{{each},class="standard"' in text


@pytest.mark.slow
async def test_metrics_of_500_requests_match_client_measurements() -> None:
    """The gateway runs in this process, so that both sides read one clock."""
    settings = (f"gateway.sla_classes={json.dumps(CLASSES)}", "gateway.default_sla=easy")
    options = ServeOptions(http_port=0, grpc_port=0, sets=settings)
    async with embedded(options, Lifecycle()) as system:
        await check_counts(system.grpc, system.http, 500, 1_500, 16, Pace())
