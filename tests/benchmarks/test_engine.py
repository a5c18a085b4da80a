"""The engine benchmark: cases, figures, profile and measured systems."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, Qwen3Config

from benchmarks.engine.bare_engine import BareEngine
from benchmarks.engine.cases import (
    DTYPES,
    MODELS,
    SYSTEMS,
    Case,
    estimated_run_s,
    estimated_s,
    kv_tokens,
    make_run_plan,
)
from benchmarks.engine.figures import decode_tok_s, key_of, show_tables, targets
from benchmarks.engine.peers import vllm_loop
from benchmarks.engine.shapes import SHAPES, kv_bytes_per_token, widened, write_model
from benchmarks.engine.step_profile import PHASES, STEP, Stopwatch, profile_step, watch
from benchmarks.engine.system_process import SystemProcess
from benchmarks.engine.systems import PEERS, LoadedSystems
from benchmarks.harness.report import Measurements, nested
from benchmarks.harness.throughput import make_prompts
from foretoken.running.options import demo_model
from services.core import Grant, Plan
from services.worker.requests.types.prompt import Prompt
from tests.gateway.gateway_fakes import demo_text
from tests.worker.worker_fixtures import engine_of

DEMO, QWEN = MODELS["demo"], MODELS["qwen3-0.6b"]


def options(**given: object) -> Namespace:
    defaults = {"quick": False, "profile": False, "models": "", "dtypes": "", "contexts": ""}
    return Namespace(
        **defaults | {"streams": "", "systems": "", "peer_python": "", "patience": 90.0} | given
    )


# --- the run plan


def test_default_measures_everything_and_quick_a_part():
    everything = make_run_plan(options())
    assert [model.name for model in everything.models] == ["demo", "padded", "qwen3-0.6b"]
    assert (everything.dtypes, everything.contexts) == (("fp32", "bf16"), (160, 1500))
    assert everything.streams == (1, 8, 32, 64)
    assert everything.repeats(DEMO) == 5 and everything.repeats(QWEN) == 3
    quick = make_run_plan(options(quick=True))
    assert (quick.models, quick.contexts, quick.streams) == ((DEMO,), (160,), (1, 8))
    assert quick.repeats(DEMO) == 2
    assert quick.cases(DEMO) == [Case(160, 1, 32, 32), Case(160, 8, 32, 32)]


def test_peer_python_adds_vllm():
    assert make_run_plan(options(peer_python="python")).systems == SYSTEMS[:-1]
    every = options(peer_python="python", systems=",".join(SYSTEMS))
    assert make_run_plan(every).systems == SYSTEMS
    assert make_run_plan(options()).systems == ("engine", "grpc", "http", "transformers")


def test_systems_option_selects_systems():
    two = make_run_plan(options(peer_python="python", systems="vllm,engine"))
    assert two.systems == ("engine", "vllm")
    assert estimated_run_s(two) < estimated_run_s(make_run_plan(options(peer_python="python")))
    slow = make_run_plan(options(systems="transformers", contexts="1500", streams="1,64"))
    assert [case.streams for case in slow.cases(DEMO)] == [1]


def test_plan_has_cases_by_context_and_model():
    plan = make_run_plan(options(streams="64,1,64"))
    assert plan.cases(DEMO) == [
        Case(160, 1, 32, 256), Case(160, 64, 32, 256), Case(1500, 1, 1500, 64),
        Case(1500, 64, 1500, 64),
    ]  # fmt: skip
    assert {case.output_tokens for case in plan.cases(QWEN)} == {16}


def test_profile_defaults_to_the_demo_model():
    assert make_run_plan(options(profile=True)).models == (DEMO,)
    assert make_run_plan(options(profile=True)).streams[-1] == 64
    assert make_run_plan(options(profile=True, models="qwen3-0.6b")).models == (QWEN,)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"models": "demo,llama"}, "--models takes demo, padded, qwen3-0.6b; got llama"),
        ({"dtypes": "fp16"}, "--dtypes takes fp32, bf16; got fp16"),
        ({"contexts": "160,2000"}, "--contexts takes 160, 1500; got 2000"),
        (
            {"streams": "1,x"},
            "--streams takes .*, separated by commas; got '1,x'",
        ),
        ({"streams": "0"}, "--streams takes numbers from 1 to 256"),
        ({"streams": "257"}, "--streams takes numbers from 1 to 256"),
        ({"systems": "engine,sglang"}, "--systems takes engine, .*; got sglang"),
        ({"systems": "vllm"}, "--systems vllm needs --peer-python"),
        ({"patience": 0.0}, "--patience takes seconds above 0, got 0"),
        ({"patience": 0.1}, "no measurement of demo takes less than 0.1 s: raise --patience"),
    ],
)
def test_invalid_option_is_a_sentence(given: dict[str, object], sentence: str):
    with pytest.raises(SystemExit, match=sentence):
        make_run_plan(options(**given))


@pytest.mark.slow
def test_invalid_command_line_is_a_sentence():
    command = [sys.executable, "-m", "benchmarks.engine", "--peer-python", "/no/such/python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == "--peer-python: there is no program /no/such/python\n"


# --- estimated durations


def test_duration_estimate_follows_the_step_cost():
    """A step of 64 rows with 160 tokens takes 4 ms + 64 · (0.1 ms + 160 · 0.8 µs) = 18.592 ms; 256
    steps follow 64 · 32 prompt tokens of 0.1 ms. transformers: 1.5 + 64 · 160 / 4,000 = 4.06 times.
    """
    case = Case(160, 64, 32, 256)
    assert estimated_s(DEMO, case, "engine") == pytest.approx(0.2048 + 256 * 0.018592)
    assert estimated_s(DEMO, case, "transformers") == pytest.approx(
        4.06 * estimated_s(DEMO, case, "engine")
    )


def test_run_duration_is_starts_plus_rounds():
    """Bare loops prefill a second time, which takes half as long again; the starts take 5 + 12 + 5
    s."""
    plan = make_run_plan(options(quick=True, dtypes="fp32", streams="1"))
    [case] = plan.cases(DEMO)
    own_s, peer_s = estimated_s(DEMO, case, "engine"), estimated_s(DEMO, case, "transformers")
    assert estimated_run_s(plan) == pytest.approx(22 + 2 * (3.5 * own_s + peer_s))
    both = make_run_plan(options(quick=True, streams="1"))
    assert estimated_run_s(both) == pytest.approx(2 * estimated_run_s(plan))


def test_measurements_above_patience_are_omitted_and_listed():
    """64 prompts of 1,500 tokens take the demo model seconds, the large one 19 minutes."""
    both = "demo,qwen3-0.6b"
    plan = make_run_plan(options(models=both, streams="1,64", contexts="1500"))
    assert [case.streams for case in plan.cases(DEMO)] == [1, 64]
    assert [case.streams for case in plan.cases(QWEN)] == [1]
    assert plan.omitted() == [
        "demo, context 1500, 64 streams: transformers",
        "qwen3-0.6b, context 1500, 64 streams: all systems",
    ]
    patient = make_run_plan(options(models=both, streams="1,64", contexts="1500", patience=1e6))
    assert patient.omitted() == []


def test_kv_has_room_for_all_requests():
    assert Case(160, 64, 32, 256).kv_tokens == 64 * 288
    assert Case(1500, 1, 1500, 64).max_tokens == 1_568  # 49 blocks of 32
    assert kv_tokens([Case(160, 1, 32, 256), Case(1500, 64, 1500, 64)]) == 64 * 1_568 * 3 // 2
    assert kv_tokens([Case(160, 1, 32, 256)]) == 8_192


# --- figures


def test_measurements_report_medians_by_key():
    taken = Measurements()
    case = Case(160, 8, 32, 256)
    for value in (5.0, 1.0, 3.0):
        taken.add(key_of(("engine_tok_s",), "fp32", DEMO, case), value)
    taken.add(key_of(("prefill_tok_s", "vllm"), "bf16", DEMO, case), 7.0)
    taken.add(("cold_start_s", "foretoken", "fp32", "demo"), 4.0)
    assert taken.medians() == {
        "engine_tok_s": {"fp32": {"demo": {"8": {"160": 3.0}}}},
        "prefill_tok_s": {"vllm": {"bf16": {"demo": {"8": {"160": 7.0}}}}},
        "cold_start_s": {"foretoken": {"fp32": {"demo": 4.0}}},
    }
    assert taken.repeats()["engine_tok_s"]["fp32"]["demo"]["8"]["160"] == [5.0, 1.0, 3.0]


def test_nested_groups_values_by_key_part():
    assert nested({("a", "b"): 1, ("a", "c"): 2, ("d",): 3}) == {"a": {"b": 1, "c": 2}, "d": 3}


def test_decode_rate_excludes_the_first_token():
    """2 streams of 4 + 11: whole 22 / 5.5 = 4 s, prefill 8 / 4 = 2 s, so 20 tokens in 2 s."""
    assert decode_tok_s(Case(160, 2, 4, 11), 5.5, 4.0) == pytest.approx(10)
    assert decode_tok_s(Case(160, 2, 4, 11), 5.5, 2.0) is None  # prefill alone took as long
    assert decode_tok_s(Case(160, 2, 4, 1), 5.5, 4.0) is None


def figures_of(engine: float, vllm: float, grpc: float) -> Measurements:
    taken = Measurements()
    for streams in (8, 64):
        case = Case(160, streams, 32, 256)
        for name, value in (("engine", engine), ("vllm", vllm), ("grpc", grpc)):
            taken.add(key_of((f"{name}_tok_s",), "fp32", DEMO, case), value)
    taken.add(key_of(("prefill_tok_s", "engine"), "fp32", DEMO, case), 9.0)
    taken.add(key_of(("prefill_tok_s", "vllm"), "fp32", DEMO, case), 10.0)
    taken.add(("cold_start_s", "foretoken", "fp32", "demo"), 5.0)
    return taken


def test_each_target_has_a_line():
    plan = make_run_plan(options(models="demo", dtypes="fp32", contexts="160", streams="8,64"))
    assert targets(figures_of(engine=1300, vllm=1000, grpc=1000), plan) == [
        "demo fp32, context 160: engine/vLLM at 8 streams: 1.30 (target 1.25)",
        "demo fp32, context 160: engine/vLLM at 64 streams: 1.30 (target 1.25)",
        "demo fp32, context 160: prefill engine/vLLM at 64 streams: 0.90 (target 1, missed)",
        "demo fp32, context 160: gRPC/engine at 64 streams: 0.77 (target 0.9, missed)",
        "demo fp32: cold start 5.0 s (target 6)",
    ]
    assert targets(Measurements(), plan) == []


def test_table_lists_measured_systems(capsys):
    plan = make_run_plan(options(models="demo", dtypes="fp32", contexts="160", streams="8,64"))
    show_tables(figures_of(engine=1300, vllm=1000, grpc=1000), plan)
    shown = capsys.readouterr().out
    assert "1,300 (1,300–1,300)" in shown and "prefill_tok_s vllm" in shown
    assert "transformers_tok_s" not in shown


# --- prompts and models


def test_prompts_are_unique():
    drawn = [tuple(p) for seed in range(20) for p in make_prompts(64, 32, seed)]
    assert len(set(drawn)) == len(drawn) and {len(p) for p in drawn} == {32}
    assert make_prompts(2, 5, seed=3) == make_prompts(2, 5, seed=3)


@pytest.mark.slow
def test_random_weights_model_has_a_word_per_id(tmp_path: Path):
    small = SHAPES["qwen3-0.6b"] | {
        "vocab_size": 2_000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    folder = write_model(tmp_path / "small", Qwen3Config(**small))
    assert kv_bytes_per_token(folder, 4) == 2 * 2 * 2 * 16 * 4
    for dtype in DTYPES.values():
        assert BareEngine(folder, 256, dtype).tokens_per_s(make_prompts(2, 8, seed=1), 3) > 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert len(tokenizer) == 2_000 and tokenizer.decode([1_999]) == "<1999>"
    assert tokenizer.encode("write star") == demo_text().encode("write star")


def test_tokenizer_is_widened():
    few = {"added_tokens": [{"id": 0}], "model": {"vocab": {"a": 1}, "merges": []}}
    assert widened(few, 4)["model"]["vocab"] == {"a": 1, "<2>": 2, "<3>": 3}


def test_large_shape_has_its_parameter_count():
    """Embeddings; a layer: q and o, k and v, three of the MLP."""
    of = SHAPES["qwen3-0.6b"]
    hidden, inner = of["hidden_size"], of["num_attention_heads"] * of["head_dim"]
    kv = of["num_key_value_heads"] * of["head_dim"]
    layer = 2 * hidden * inner + 2 * hidden * kv + 3 * hidden * of["intermediate_size"]
    total = of["vocab_size"] * hidden + of["num_hidden_layers"] * layer
    assert total == pytest.approx(0.6e9, rel=0.01)


# --- the profile


def test_phase_time_excludes_nested_phases():
    """Phase a begins at 0 and ends at 9; b begins at 1 and ends at 4."""
    clock = iter([0.0, 1.0, 4.0, 9.0, 10.0, 12.0])
    stopwatch = Stopwatch(lambda: next(clock))
    inner = stopwatch.timed("b", lambda: "result")
    assert stopwatch.timed("a", inner)() == "result"
    assert stopwatch.take() == {"a": 1.0 + 5.0, "b": 3.0}
    with pytest.raises(ZeroDivisionError):
        stopwatch.timed("a", lambda: 1 / 0)()
    assert stopwatch.take() == {"a": 2.0}


def test_engine_has_every_phase():
    """Fails when a method is renamed and PHASES is not updated."""
    engine = engine_of("llama")
    stopwatch = Stopwatch()
    assert watch(engine, stopwatch) == []
    engine.add(Prompt("a", (5, 6, 7), 3, 4), 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant("a", 4),)), 0.0)
    while engine.step():
        pass
    spent = stopwatch.take()
    assert set(spent) == set(PHASES) and min(spent.values()) > 0


def test_missing_phase_is_reported():
    engine = engine_of("llama")
    del engine._kernels
    assert watch(engine, Stopwatch()) == ["prepare", "attention"]


@pytest.mark.slow
def test_full_decode_step_is_profiled():
    found = profile_step(demo_model(), "fp32", Case(160, 3, 32, 16))
    assert (found.rows, found.steps, found.missing) == (3, 4, ())
    assert list(found.phases_ms) == list(PHASES) and found.phases_ms[STEP] > 0
    assert 40 <= found.context_tokens <= 56
    assert "aten::" in found.calls


# --- measured systems


@pytest.mark.slow
async def test_separate_process_reports_its_error(tmp_path: Path):
    why = "it has no config.json"
    with (
        SystemProcess(BareEngine, str(tmp_path), 256) as engine,
        pytest.raises(ValueError, match=why),
    ):
        await engine.start()


async def test_python_without_vllm_is_reported():
    async with vllm_loop(sys.executable, demo_model(), "float32", 8_192, 1, 320) as loop:
        with pytest.raises(RuntimeError, match=r"vLLM ended: .*No module named 'vllm'"):
            await loop.wait_until_ready()


async def test_failing_peer_is_missing_and_a_failing_engine_raises():
    async def fail(prompts: object, output_tokens: int) -> float:
        raise RuntimeError("no\n kernels")

    found = LoadedSystems({"transformers": fail, "engine": fail})
    assert set(PEERS) == {"transformers", "vllm", "vllm_http"}
    assert await found.measure("transformers", [[1]], 2) is None
    assert (
        found.missing == {"transformers": "no kernels"} and "transformers" not in found.throughputs
    )
    assert await found.measure("vllm", [[1]], 2) is None
    with pytest.raises(RuntimeError, match="no\n kernels"):
        await found.measure("engine", [[1]], 2)


@pytest.mark.slow
def test_small_run_of_all_systems(tmp_path: Path):
    path = tmp_path / "figures.json"
    arguments = ["--quick", "--dtypes", "fp32", "--streams", "2", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine", *arguments],
        capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gRPC/engine at 2 streams" in done.stdout
    assert "--peer-python" in done.stdout  # how to install vLLM
    found = json.loads(path.read_text())
    for key in ("engine_tok_s", "grpc_tok_s", "http_tok_s"):
        assert found[key]["fp32"]["demo"]["2"]["160"] > 0
        assert len(found["repeats"][key]["fp32"]["demo"]["2"]["160"]) == 2
    assert found["prefill_tok_s"]["engine"]["fp32"]["demo"]["2"]["160"] > 0
    assert found["cold_start_s"]["foretoken"]["fp32"]["demo"] > 0
    assert "transformers_tok_s" in found or "transformers" in found["not_available"]
