"""Pools of prompts with known lengths, for loads of emulated systems."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.overload.__main__ import QUICK, about_model, served_model, sizes_for
from benchmarks.overload.prompt_pool import MOST_OUTPUT_TOKENS, PromptPool, file_pool
from benchmarks.overload.systems import ServedModel
from services.predictor.models.lengths_file import read_lengths as read_oracle
from services.worker.emulation.lengths import read_lengths

ROWS = {"a" * 10: 5, "b" * 10: 7, "c" * 5_000: 3, "d": MOST_OUTPUT_TOKENS + 1, "": 4, "é" * 400: 9}


@pytest.fixture
def file(tmp_path: Path) -> str:
    rows = ({"prompt": prompt, "output_tokens": tokens} for prompt, tokens in ROWS.items())
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "prompts.jsonl")


def options(**given: object) -> Namespace:
    defaults: dict[str, object] = dict.fromkeys(("emulate", "prompts", "peer_python"), "")
    return Namespace(**defaults | {"padded": False, "dtype": "float32", "workers": 1} | given)


def test_file_pool_has_what_fits_into_the_context(file: str):
    """The 400 characters of the last prompt have 800 bytes, too many for half of 1,024 tokens."""
    whole, short = file_pool(file, 8_192), file_pool(file, 1_024)
    assert list(whole.lengths) == [5, 7, 9] and list(short.lengths) == [5, 7]
    assert (whole.max_tokens, short.max_tokens) == (2_048, 512)
    with pytest.raises(ValueError, match="no prompt has at most 0 bytes and an answer of at most"):
        file_pool(file, 128)


def test_bodies_repeat_prompts_only_if_there_are_too_few(file: str):
    pool = file_pool(file, 8_192)
    three, six = pool.draw_bodies(3, seed=1), pool.draw_bodies(6, seed=1)
    assert len({str(json.loads(body)["messages"]) for body in three}) == 3
    assert len(six) == 6 and pool.draw_bodies(6, seed=1) == six != pool.draw_bodies(6, seed=2)
    assert json.loads(six[0])["max_tokens"] == 2_048


def test_oracle_and_emulated_engine_read_the_written_lengths(tmp_path: Path):
    system = {"role": "system", "content": "Be brief."}
    chats = [[{"role": "user", "content": "What?"}], [system, {"role": "user", "content": "Why?"}]]
    path = tmp_path / "lengths.jsonl"
    PromptPool(chats, [3, 8], 99).write_lengths(path)
    assert read_oracle(str(path), 8_192) == {("", "What?"): 3, ("Be brief.", "Why?"): 8}
    assert read_lengths(path) == {"What?": 3, "Why?": 8}


def test_served_model_says_what_is_emulated(file: str):
    model = served_model(options(emulate="h100-llama3-8b", prompts=file, workers=2), "")
    assert about_model(model) == {
        "emulated": "h100-llama3-8b",
        "prompts": "prompts.jsonl",
        "workers": 2,
        "kv_tokens": model.hardware.kv_tokens if model.hardware else 0,
    }
    assert model.arguments[:3] == ["--emulate", "h100-llama3-8b", "--emulate-lengths"]
    assert model.arguments[-2:] == ["--workers", "2"]


def test_sizes_fit_the_emulated_hardware(tmp_path: Path, file: str):
    """Answers of 5, 7 and 9 tokens: 7 on average, so that 4 of them fit into 28 tokens of KV. A
    step of 4 rows takes 2 s, 2 tokens/s. Twice the longest answer is 36 s; in the 72 s that are
    half of the time for the capacity, 144 tokens are 20 answers."""
    cost = "base_s = 2.0\nprefill_token_s = 0.0\ndecode_seq_s = 0.0\ncontext_token_s = 0.0\n"
    limits = "[memory]\nkv_tokens = 28\n[engine]\nmax_context_tokens = 8192\n"
    (tmp_path / "slow.toml").write_text(f"[cost]\n{cost}{limits}")
    slow = served_model(options(emulate=str(tmp_path / "slow.toml"), prompts=file), "")
    fitted = sizes_for(slow, QUICK)
    assert (fitted.timeout_s, fitted.burst) == (36.0, 20)
    fast = served_model(options(emulate="h100-llama3-8b", prompts=file), "")
    assert sizes_for(fast, QUICK) == QUICK
    assert sizes_for(ServedModel(), QUICK) == QUICK


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"emulate": "h10"}, "unknown hardware 'h10'"),
        ({"emulate": "cpu2-demo", "prompts": "/no/such"}, "cannot read /no/such: No such file"),
        ({"emulate": "cpu2-demo", "padded": True}, "--emulate has no model: leave out --padded"),
        ({"prompts": "f"}, "--prompts needs --emulate HARDWARE"),
        ({"workers": 0}, "--workers must be at least 1, got 0"),
    ],
)
def test_contradictory_options_are_one_sentence(given: dict[str, object], message: str):
    with pytest.raises(SystemExit, match=message):
        served_model(options(**given), "")
