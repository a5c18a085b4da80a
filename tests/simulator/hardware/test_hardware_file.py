"""Hardware files: the shipped profiles, files of a user's own, and mistakes in them."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.costs import CostModel
from simulator.hardware.hardware import Hardware
from simulator.hardware.hardware_file import (
    list_hardware,
    load_hardware,
    read_hardware,
    write_hardware,
)

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "simulator" / "hardware"
COST = """
[cost]
base_s = 0.01
prefill_token_s = 1e-5
decode_seq_s = 1e-5
context_token_s = 1e-8
"""
GOOD = COST + "[memory]\nkv_tokens = 4_096\n"
ROOFLINE = '[roofline]\ngpu = "a100-80g"\nmodel = "llama2-7b"\n'


def test_list_hardware_returns_the_shipped_profiles():
    assert list_hardware() == [
        "a100-40g-llama3-8b",
        "a100-80g-llama2-13b",
        "a100-80g-llama2-13b-ds",
        "a100-80g-llama2-13b-hf",
        "a100-80g-llama2-70b",
        "a100-80g-llama2-7b",
        "cpu2-demo",
        "cpu2-demo-padded",
        "h100-llama3-70b",
        "h100-llama3-8b",
        "h200-llama3-70b",
        "h200-llama3-8b",
        "rtx4090-llama3.1-8b",
        "rtxpro6000-llama3.1-8b",
        "v100-32g-chatglm-6b",
        "v100-32g-opt-13b",
    ]


@pytest.mark.parametrize("name", list_hardware())
def test_shipped_profile_is_complete_and_plausible(name):
    hardware = load_hardware(name)
    assert hardware.name == name
    assert hardware.about
    assert hardware.source.startswith(("Derived: ", "Fitted ")), hardware.source
    assert hardware.limits(prefix_sharing=False).kv_blocks * 16 <= hardware.kv_tokens
    assert hardware.view("w0", "m").kv_tokens <= hardware.kv_tokens
    alone_s = hardware.cost.step_s(0, 1, 100)
    assert 1e-4 < alone_s < 0.1
    crowd = hardware.cost.decode_tokens_per_s(8, 200)
    assert crowd > 1 / alone_s  # batching pays
    assert hardware.cost.step_s(500, 0, 500) < 1.0


def test_profile_steps_are_shorter_on_faster_gpus_and_smaller_models():
    def step_s(name: str) -> float:
        return load_hardware(name).cost.step_s(0, 16, 8_000)

    assert step_s("h200-llama3-8b") < step_s("h100-llama3-8b") < step_s("rtxpro6000-llama3.1-8b")
    assert step_s("rtxpro6000-llama3.1-8b") < step_s("rtx4090-llama3.1-8b")
    assert step_s("a100-80g-llama2-7b") < step_s("a100-80g-llama2-13b")
    assert step_s("a100-80g-llama2-13b-ds") < step_s("a100-80g-llama2-13b-hf")
    assert step_s("cpu2-demo") < step_s("cpu2-demo-padded")


def test_hugging_face_profiles_reproduce_the_times_printed_in_papers():
    """SCLS Fig. 11: 13.5 s and 7.6 s; Magnus Fig. 6: 242 s and 60 s."""
    scls = load_hardware("a100-80g-llama2-13b-hf").cost
    assert scls.serve_s(16, 1_024, 128) == pytest.approx(13.5, abs=0.05)
    apart_s = scls.serve_s(15, 10, 128) + scls.serve_s(1, 1_024, 128)
    assert apart_s == pytest.approx(7.6, abs=0.05)
    magnus = load_hardware("v100-32g-chatglm-6b").cost
    assert 3 * magnus.serve_s(7, 1_000, 1_000) == pytest.approx(242, abs=0.5)
    sorted_s = magnus.serve_s(18, 10, 10) + magnus.serve_s(3, 1_000, 1_000)
    assert sorted_s == pytest.approx(60, abs=0.5)


@pytest.mark.parametrize(
    ("name", "seqs", "tokens", "share"),
    [
        ("v100-32g-chatglm-6b", 7, 2_048, 1.0),  # Magnus, V-A
        ("a100-80g-llama2-13b-hf", 16, 2_048, 0.9),  # SCLS, 5.1, Eq. 9
        ("a100-80g-llama2-13b-ds", 12, 2_048, 1.0),  # SCLS, Algorithm 2
        ("a100-80g-llama2-13b-ds", 22, 1_024, 1.0),
        ("a100-80g-llama2-13b-ds", 28, 512, 1.0),
    ],
)
def test_static_profiles_hold_the_batches_of_papers(name, seqs, tokens, share):
    hardware = load_hardware(name)
    assert seqs * tokens <= share * hardware.kv_tokens
    assert seqs <= hardware.max_running


def test_chatglm_profile_cannot_hold_a_batch_of_eight():
    assert load_hardware("v100-32g-chatglm-6b").kv_tokens < 8 * 2_048


def test_a100_profile_has_the_kv_capacity_of_past_future_table_1():
    assert load_hardware("a100-80g-llama2-7b").kv_tokens == pytest.approx(120_000, rel=0.005)


def test_load_hardware_reads_a_file_by_path(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(GOOD)
    hardware = load_hardware(file)
    assert (hardware.name, hardware.kv_tokens, hardware.cost.base_s) == ("mine", 4_096, 0.01)
    assert load_hardware(str(file)) == hardware
    assert hardware.max_context_tokens == 2**20


def test_roofline_accepts_a_gpu_table():
    text = ROOFLINE.replace('gpu = "a100-80g"', "")
    text += """[roofline.gpu]
memory_gib = 48
bandwidth = 864e9
float32_flops = 91.6e12
float16_flops = 181e12
int8_flops = 362e12
host_bandwidth = 31.5e9
link_bandwidth = 31.5e9
link_latency_s = 30e-6
"""
    hardware = read_hardware(text, "l40s", "l40s.toml")
    assert hardware.max_context_tokens == 4_096
    assert hardware.kv_tokens == int((48 * 2**30 * 0.9 - 2**30 - 13_476_831_232) / 2**19)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[cost\n", "x.toml is not TOML: "),
        ("", "x.toml: give either [cost] or [roofline]"),
        (GOOD + ROOFLINE, "x.toml: give either [cost] or [roofline]"),
        (COST, "x.toml: memory.kv_tokens is missing; only [roofline] can derive it"),
        (GOOD + "host_gib = 1\n", "x.toml: memory.host_gib needs [roofline]; give"),
        (GOOD + "kv_token = 1\n", "x.toml: unknown key memory.kv_token, did you mean kv_tokens?"),
        ("[costs]\nbase_s = 1\n", "x.toml: unknown key costs, did you mean cost?"),
        (ROOFLINE + "gpus = 2\n", "x.toml: unknown key roofline.gpus, did you mean gpu?"),
        (
            GOOD.replace("4_096", "0"),
            "x.toml: memory.kv_tokens should be greater than or equal to 1 (got 0)",
        ),
        (
            GOOD.replace("base_s = 0.01", "base_s = -1"),
            "x.toml: cost.base_s should be greater than or equal to 0 (got -1)",
        ),
        (
            GOOD.replace("base_s = 0.01", 'base_s = "fast"'),
            "x.toml: cost.base_s should be a valid number (got 'fast')",
        ),
        (GOOD.replace("base_s = 0.01\n", ""), "x.toml: cost.base_s is missing"),
        (GOOD.replace("4_096", "8"), "x.toml: memory.kv_tokens is 8, less than one block of 16"),
        (
            GOOD.replace("4_096", "134_217_744"),
            "x.toml: memory.kv_tokens must be at most 134,217,728 (8,388,608 blocks of 16 tokens)",
        ),
        (
            ROOFLINE + "[memory]\nhost_gib = 1e6\n",
            "x.toml: memory.host_tokens must be at most 134,217,728",
        ),
        (
            ROOFLINE + "[memory]\nhost_gib = inf\n",
            "x.toml: memory.host_gib should be less than or equal to 1048576 (got inf)",
        ),
        (
            ROOFLINE.replace("llama2-7b", "llama2-7"),
            "x.toml: unknown model 'llama2-7', did you mean llama2-7b?",
        ),
        (ROOFLINE.replace("2-7b", "2-70b"), "x.toml: 128.5 GiB of weights on 1 GPU of 80 GiB"),
        (
            ROOFLINE + "[memory]\nkv_tokens = 4_096\nutilization = 0.5\n",
            "x.toml: memory.utilization has no effect beside memory.kv_tokens; give one of them",
        ),
        (ROOFLINE + 'dtype = "fp16"\n', "x.toml: roofline.dtype should be 'float32', "),
    ],
)
def test_hardware_error_names_file_key_and_value(text, message):
    with pytest.raises(ValueError) as error:
        read_hardware(text, "x", "x.toml")
    assert str(error.value).startswith(message), str(error.value)


def test_unknown_hardware_error_suggests_the_nearest_profile():
    with pytest.raises(ValueError, match=r"^unknown hardware 'h100-lama3-8b', did you mean h100-l"):
        load_hardware("h100-lama3-8b")
    with pytest.raises(ValueError, match=r"^cannot read gone\.toml: No such file"):
        load_hardware("gone.toml")


COEFFICIENT = st.floats(1e-12, 10)
TEXT = st.text(max_size=40)


@given(st.lists(COEFFICIENT, min_size=7, max_size=7), st.integers(16, 10**7), TEXT, TEXT)
def test_written_hardware_file_round_trips(costs, tokens, about, source):
    base, prefill, decode, context, offload, upload, quantize = costs
    cost = CostModel(
        base,
        prefill,
        decode,
        context,
        source=source or "file",
        offload_token_s=offload,
        upload_token_s=upload,
        quantize_token_s=quantize,
    )
    hardware = Hardware(
        "x", cost, tokens, tokens // 2, attends_padding=tokens % 2 == 1,
        usd_per_hour=base, source=source, about=about,
    )  # fmt: skip
    assert read_hardware(write_hardware(hardware), "x", "x.toml") == hardware


def test_package_data_includes_hardware_tables_and_profiles():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["simulator.hardware"]
    data = [file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*.toml")]
    assert data
    assert all(any(fnmatch(file, pattern) for pattern in patterns) for file in data)
    assert any(fnmatch("simulator.hardware", p) for p in settings["packages"]["find"]["include"])


def test_documented_hardware_file_is_read():
    page = (ROOT / "docs" / "simulator.md").read_text()
    text = page.partition("```toml\n")[2].partition("```")[0]
    hardware = read_hardware(text, "l40s-llama3-8b", "docs")
    assert hardware.about == "Llama-3 8B on two L40S"
    assert hardware.usd_per_hour == 2.0
    assert hardware.kv_tokens > 400_000
