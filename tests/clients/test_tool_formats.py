"""The readers of calls and reasoning, on canitoolcall's answers of models."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gateway.faces.http.dialect.tools import read_tools
from gateway.readers.formats import select_formats
from gateway.readers.joined import join_parts
from gateway.readers.opening import select_reader
from gateway.types.tools import ToolUse

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

# The beginning of a model's name, and the formats of its calls and reasoning.
FORMATS = (
    ("deepseek-ai/DeepSeek-V3-", ("deepseek_v3", "none")),
    ("deepseek-ai/DeepSeek-V3.1", ("deepseek_v31", "deepseek_v3")),
    ("deepseek-ai/DeepSeek-V3.2", ("deepseek_v32", "deepseek_v3")),
    ("deepseek-ai/DeepSeek-V4-", ("deepseek_v4", "deepseek_v3")),
    ("zai-org/GLM-4.5", ("glm45", "glm45")),
    ("zai-org/GLM-", ("glm47", "glm45")),
    ("openai/", ("openai", "openai_gptoss")),
    ("moonshotai/Kimi-K2", ("kimi_k2", "kimi_k2")),
    ("meta-llama/Llama-3", ("llama3_json", "none")),
    ("meta-llama/Llama-4", ("llama4_pythonic", "none")),
    ("mistralai/", ("mistral", "mistral")),
    ("Qwen/Qwen3-Coder", ("qwen3_coder", "none")),
    ("Qwen/Qwen3-4B-Thinking", ("hermes", "deepseek_r1")),
    ("Qwen/Qwen3-", ("hermes", "qwen3")),
    ("Qwen/", ("qwen3_coder", "qwen3")),
)
UNREAD = ("deepseek-ai/DeepSeek-V4.1", "google/gemma-4", "moonshotai/Kimi-K3")
# Answers that are read otherwise, besides those that a limit cuts: the beginning of a call is told
# with `finish_reason: length`, as at OpenAI, where the suite wants none.
DEVIATIONS = {
    "deepseek/sglang-v4-self-closing-invoke": "not in the format of DeepSeek's encoder",
    "glm/glm47-missing-last-close-arg-value": "a text may have </tool_call>",
    "kimi/k2i-vllm-noise-between-markers": "a malformed section is content",
    "kimi/k2i-vllm-empty-tool-section": "a malformed section is content",
    "mistral/vllm-v3-arguments-before-name": "a call is told from its name on",
    "mistral/vllm-v3-name-inside-arguments": "a call is told from its name on",
    "mistral/vllm-v11-think-text": "another reasoning parser reads <think>",
    "qwen3-xml/llamacpp-q35-call-inside-think": "reasoning may speak of calls",
}
Read = tuple[str | None, str | None, list[tuple[str, Any]]]


@cache
def load(folder: Path) -> list[dict[str, Any]]:
    """The answers, with the end of the prompt of each."""
    found = []
    for path in sorted(folder.glob("*/*.jsonl")):
        models = json.loads((path.parent / "family.json").read_text())["reference_models"]
        ends = {model["repo"]: model.get("default_generation_prompt") for model in models}
        for line in path.read_text().splitlines():
            given = json.loads(line)
            end = given.get("generation_prompt")
            given["prompt_end"] = (end if end is not None else ends.get(given["models"][0])) or ""
            found.append(given)
    return found


def read(given: dict[str, Any], pieces: list[str]) -> Read:
    names = next(names for begin, names in FORMATS if given["models"][0].startswith(begin))
    use = ToolUse(read_tools(given["tools"]))
    opener = select_reader(select_formats("", *names), use, given["prompt_end"])
    assert opener is not None
    reader = opener()
    parts = [part for piece in pieces for part in reader.feed(piece)]
    answer = join_parts([*parts, *reader.finish("truncated" in given["tags"])])
    calls = [(call.name, _parse(call.arguments)) for call in answer.calls]
    return _plain(answer.content), _plain(answer.reasoning), calls


def _parse(arguments: str) -> Any:
    """The arguments; those that a limit cut as they are."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _plain(text: str | None) -> str | None:
    """Without differences in blanks."""
    return " ".join(text.split()) or None if text else None


def deviate(given: dict[str, Any]) -> Iterator[str]:
    """What differs from what is expected."""
    text = given["raw_output"]
    whole, single = read(given, [text]), read(given, list(text))
    assert whole == single, given["id"]
    if "expected_error" in given:
        if whole[2]:
            yield f"calls {whole[2]}"
        return
    wanted = given["expected"]
    calls = [(call["name"], call["arguments"]) for call in wanted["tool_calls"]]
    expected = (_plain(wanted["content"]), _plain(wanted["reasoning_content"]), calls)
    if (_squeeze(whole[0]), *whole[1:]) != (_squeeze(expected[0]), *expected[1:]):
        yield f"{whole}, not {expected}"


def _squeeze(text: str | None) -> str | None:
    """Without blanks: those around calls are dropped."""
    return "".join(text.split()) if text else text


def test_readers_find_what_canitoolcall_expects(python: Callable[[str], Path]) -> None:
    (folder,) = (
        python("canitoolcall")
        .parents[1]
        .glob("lib/python3*/site-packages/canitoolcall/_data/fixtures")
    )
    answers = [each for each in load(folder) if not each["models"][0].startswith(UNREAD)]
    assert len(answers) > 350
    differing = {each["id"]: what for each in answers for what in deviate(each)}
    cut = {each["id"] for each in answers if "truncated" in each["tags"]}
    unexpected = {name: differing[name] for name in differing.keys() - cut - DEVIATIONS.keys()}
    assert not unexpected
    assert DEVIATIONS.keys() <= differing.keys()
