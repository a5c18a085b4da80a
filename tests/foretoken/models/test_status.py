"""The ready line and the status line of several models."""

from foretoken.running.console.fleets import merge_fleets
from foretoken.running.console.status import format_fleet, ready_line
from protos.generated import scheduler_pb2


def fleet(model: str, running: int, queued: int, drain_s: float) -> scheduler_pb2.FleetView:
    worker = scheduler_pb2.WorkerInfo(
        model=model,
        kv_tokens=100,
        held_tokens=50,
        running=running,
        placement="float32",
        start="1 s",
    )
    return scheduler_pb2.FleetView(
        workers=[worker], queued=queued, drain_s=drain_s, policy="foretoken"
    )


def test_status_of_several_models_is_one_line() -> None:
    fleets = [fleet("a", 1, 2, 3.0), fleet("b", 4, 5, 1.0)]
    assert merge_fleets(fleets[:1]) == fleets[0]
    line = format_fleet(merge_fleets(fleets))
    assert line == "5 running · 7 waiting · KV 50% · 2 worker(s) · drains in 3 s"
    ready = ready_line(fleets, "http://h:1", "h:2")
    each = "float32, 1 worker(s) with 100 KV tokens each"
    assert ready.startswith(f"foretoken is ready: a, {each}; b, {each}, policy foretoken, started")
    assert ready.endswith("HTTP http://h:1, gRPC h:2")
