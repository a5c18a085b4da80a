"""What servers say about their capacity, and how many requests one gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.backend.capacity import (
    CALM_READINGS,
    Capacity,
    Load,
    Window,
    from_llama_cpp,
    from_metrics,
    from_models,
    from_sglang,
    from_tgi,
    limits_of,
    parse_metrics,
    read_load,
)
from services.worker.config import WorkerConfig

VLLM = """# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100",engine="0"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="50",engine="1"} 1.0
"""


def test_metrics_of_vllm_add_its_engines() -> None:
    samples = list(parse_metrics(VLLM))
    assert from_metrics(samples) == Capacity(2_400, 16)
    assert read_load(samples) == Load(4)


@pytest.mark.parametrize(
    ("text", "waiting"),
    [
        ("", None),
        ("sglang:num_queue_reqs 2\n", 2),
        ("tgi_queue_size 5\n", 5),
        ("llamacpp:requests_deferred 0\n", 0),
        ("vllm:num_requests_waiting x\n", None),
        ("vllm:num_requests_waiting NaN\n", None),
        ("sglang:num_queue_reqs +Inf\nsglang:num_queue_reqs 2\n", 2),
    ],
)
def test_waiting_requests_by_server(text: str, waiting: int | None) -> None:
    assert read_load(parse_metrics(text)) == Load(waiting)


def test_pages_of_servers() -> None:
    assert from_models({"id": "m", "max_model_len": 4_096}) == Capacity(max_context_tokens=4_096)
    assert from_models({"id": "m", "meta": None, "max_model_len": None}) == Capacity()
    sglang = {"max_total_num_tokens": 9_000, "max_running_requests": 48, "context_length": None}
    assert from_sglang(sglang) == Capacity(9_000, 0, 48)
    llama = {"total_slots": 4, "default_generation_settings": {"n_ctx": 1_024}}
    assert from_llama_cpp(llama) == Capacity(4_096, 1, 4, 1_024)
    assert from_llama_cpp({}) == Capacity()
    tgi = {"max_batch_total_tokens": 8_000, "max_concurrent_requests": 128, "max_total_tokens": 2}
    assert from_tgi(tgi) == Capacity(8_000, 0, 128, 2)


@pytest.mark.parametrize(
    ("given_settings", "told", "expected"),
    [  # kv_blocks, block_tokens, max_running, max_context_tokens
        ({}, Capacity(2_400, 8, 32, 512), (300, 8, 32, 512)),
        ({"kv_tokens": 800}, Capacity(2_400, 8, 32, 512), (100, 8, 32, 512)),
        ({"max_running": 4, "max_context_tokens": 64}, Capacity(160, 16, 32, 512), (10, 16, 4, 64)),
        ({}, Capacity(max_context_tokens=64), (1_024, 16, 256, 64)),  # memory is no limit
        ({"block_tokens": 4}, Capacity(160, 16), (40, 4, 256, 2**31 - 1)),
    ],
)
def test_limits_are_given_then_told_then_defaults(
    given_settings: dict, told: Capacity, expected: tuple[int, ...]
) -> None:
    limits = limits_of(WorkerConfig(**given_settings), told, frozenset({1}))
    sizes = (limits.kv_blocks, limits.block_tokens, limits.max_running, limits.max_context_tokens)
    assert sizes == expected
    assert limits.eos_ids == {1}


def test_window_shrinks_by_refusals_and_grows_while_it_is_full() -> None:
    window = Window(16)
    assert window.size == 16
    for accepted in (12, 11, 10):  # six of sixteen are refused
        window.on_refused(accepted)
    assert window.size == 10
    for _ in range(CALM_READINGS):
        window.on_load(running=10, waiting=None)
    window.on_load(running=4, waiting=None)  # not full
    assert window.size == 10
    window.on_load(running=10, waiting=0)  # + 10 / 8
    assert window.size == 11
    for _ in range(20):
        window.on_load(running=window.size, waiting=0)
    assert window.size == 16


def test_window_makes_no_room_while_requests_wait_at_the_server() -> None:
    window = Window(16)
    for running in (12, 11, 11, 10):
        window.on_load(running, waiting=3)
        assert window.size == running
    window.on_load(running=9, waiting=0)
    assert window.size == 10


@given(
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(0, 400), st.one_of(st.none(), st.integers(-1, 9)))),
)
def test_window_stays_between_one_and_most(most: int, readings: list) -> None:
    window = Window(most)
    for running, waiting in readings:
        if waiting == -1:
            window.on_refused(running)
        else:
            window.on_load(running, waiting)
        assert 1 <= window.size <= most
