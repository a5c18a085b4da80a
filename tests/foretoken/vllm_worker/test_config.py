"""Settings of a worker with vLLM's engine, in vLLM's terms."""

import pytest

from foretoken.running.engines import ENGINES
from foretoken.running.options import ServeOptions, sections
from foretoken.running.topology import Shape, arrange
from foretoken.vllm.worker.config import VllmWorkerConfig, engine_arguments, environment
from services.runtime.config import ConfigError, load


def loaded(**overrides: str) -> VllmWorkerConfig:
    return load(VllmWorkerConfig, overrides)


def test_settings_become_arguments_of_vllms_engine() -> None:
    config = loaded(
        model="m",
        dtype="float32",
        tensor_parallel="2",
        max_running="8",
        max_batch_tokens="64",
        max_context_tokens="512",
        block_tokens="32",
        prefix_sharing="false",
        vllm_args='{"enforce_eager": true, "dtype": "half"}',
    )
    made = engine_arguments(config)
    assert made == {
        "model": "m",
        "dtype": "half",  # vllm_args win
        "tensor_parallel_size": 2,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "block_size": 32,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "disable_log_stats": True,
        "seed": 0,
    }


def test_vllm_chooses_what_is_not_set() -> None:
    made = engine_arguments(loaded())
    chosen = {"block_size", "max_model_len", "max_num_batched_tokens", "gpu_memory_utilization"}
    assert not chosen & made.keys()


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("speculative_tokens", "3", "speculative_tokens has no effect with vLLM's engine"),
        ("quantization", "int8", "vLLM loads quantized checkpoints by itself"),
        ("host_gib", "1", "vLLM frees the KV of paused requests"),
        ("kv_dtype", "int8", "kv_cache_dtype"),
        ("kernels", "numba", "leave it out"),
    ],
)
def test_what_vllm_does_not_have_is_refused(key: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        loaded(**{key: value})


def test_values_that_mean_what_vllm_does_are_accepted() -> None:
    loaded(host_gib="0", quantization="none", kv_dtype="auto", swap_dtype="int8")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {}),
        ({"local_workers": "4"}, {"CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "2"}),
        (
            {"local_workers": "4", "local_rank": "3", "tensor_parallel": "2"},
            {"CUDA_VISIBLE_DEVICES": "6,7", "OMP_NUM_THREADS": "1"},
        ),
        ({"device": "cuda:2"}, {"CUDA_VISIBLE_DEVICES": "2"}),
        ({"device": "cpu", "local_workers": "2"}, {"OMP_NUM_THREADS": "4"}),
        ({"torch_threads": "3"}, {"OMP_NUM_THREADS": "3"}),
    ],
)
def test_workers_of_a_machine_share_its_gpus_or_cores(
    overrides: dict[str, str], expected: dict[str, str]
) -> None:
    made = environment(loaded(**overrides), cores=8, given={})
    shares = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    assert {key: made[key] for key in shares if key in made} == expected
    assert ("VLLM_CPU_OMP_THREADS_BIND" in made) == ("OMP_NUM_THREADS" in expected)


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ({"local_workers": "2"}, "4"),
        ({"local_workers": "2", "local_rank": "1"}, "7"),
        ({"device": "cuda:1"}, "7"),
        ({"local_workers": "1"}, None),  # all that are visible
    ],
)
def test_gpus_are_counted_among_the_visible_ones(
    overrides: dict[str, str], gpus: str | None
) -> None:
    given = {"CUDA_VISIBLE_DEVICES": "4,7", "VLLM_LOGGING_LEVEL": "DEBUG"}
    made = environment(loaded(**overrides), cores=8, given=given)
    assert made.get("CUDA_VISIBLE_DEVICES") == gpus
    assert "VLLM_LOGGING_LEVEL" not in made


def test_too_few_visible_gpus_are_a_sentence() -> None:
    config = loaded(local_workers="3", local_rank="2")
    with pytest.raises(ValueError, match="needs GPU 2 of those in CUDA_VISIBLE_DEVICES=4,7"):
        environment(config, cores=8, given={"CUDA_VISIBLE_DEVICES": "4,7"})


@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_chooses_the_workers_module(name: str) -> None:
    made = arrange([sections(ServeOptions(engine=name))], Shape.SHARED, 2, 1, "/run/x", name)
    modules = {child.module for child in made.children if child.section == "worker"}
    assert modules == {ENGINES[name].module}
