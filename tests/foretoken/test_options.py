"""Where `foretoken serve`'s options go; what is left out overrides nothing."""

import pytest

from foretoken.options import ServeOptions, demo_model, sections
from services.worker.config import WorkerConfig


@pytest.mark.parametrize(
    ("options", "worker"),
    [
        (ServeOptions(), {}),
        (ServeOptions(kv_tokens=512), {"kv_tokens": "512"}),
        (ServeOptions(kv_dtype="int8"), {"kv_dtype": "int8"}),
        (ServeOptions(host_gib=0.5), {"host_gib": "0.5"}),
        (ServeOptions(host_gib=0.0), {"host_gib": "0.0"}),
        (ServeOptions(host_gib=2.0, sets=["worker.host_gib=1"]), {"host_gib": "1"}),
    ],
)
def test_the_worker_s_options(options: ServeOptions, worker: dict[str, str]) -> None:
    assert sections(options)["worker"] == {"model": demo_model(), **worker}
    assert set(worker) <= set(WorkerConfig.model_fields)


def test_a_policy_left_out_leaves_the_scheduler_s_own() -> None:
    assert sections(ServeOptions())["scheduler"] == {}
    assert sections(ServeOptions(policy="fcfs"))["scheduler"] == {"policy": "fcfs"}
