"""Settings of an emulated engine: a hardware file of the simulator, and the lengths of answers."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gateway.requests.text import TemplateError, Text
from services.runtime.config import load
from services.worker.config import WorkerConfig
from services.worker.emulation.config import EmulationConfig, check_engine
from services.worker.emulation.lengths import read_lengths
from simulator.hardware.hardware import Hardware
from simulator.hardware.hardware_file import load_hardware

Sections = Mapping[str, dict[str, str]]
MESSAGE = "pale quartz 4711"  # occurs in no template
# Conversations that end with it: the text before it differs, up to what begins a user message.
CONVERSATIONS = (
    ({"role": "user", "content": MESSAGE},),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": MESSAGE}),
    (
        {"role": "user", "content": "Good morning!"},
        {"role": "assistant", "content": "Good evening."},
        {"role": "user", "content": MESSAGE},
    ),
)


def emulated_sections(name: str, lengths: str, overrides: Sections) -> dict[str, dict[str, str]]:
    """Returns the sections of a system with workers that emulate this hardware: a name or a file.

    `lengths`: file of prompts and the lengths of their answers; empty: all are drawn. Given
    settings win over the hardware's. Raises ValueError with a sentence for an unknown name, a file
    that cannot be used, or a setting without effect.
    """
    hardware = load_hardware(name)
    if overrides["worker"].get("swap_dtype") == "int8":
        hardware = hardware.with_int8_at_rest()
    front = overrides["gateway"]
    emulation = _settings(hardware) | _lengths(lengths, front["model"], front.get("chat_template"))
    merged = {section: dict(values) for section, values in overrides.items()}
    merged["emulation"] = emulation | overrides["emulation"]
    merged["worker"] = _sizes(hardware) | overrides["worker"]
    merged["gateway"] = {"system_fingerprint": f"emulated-{hardware.name}"} | front
    check_engine(load(WorkerConfig, merged["worker"]), load(EmulationConfig, merged["emulation"]))
    return merged


def _sizes(hardware: Hardware) -> dict[str, str]:
    """Section `worker`: what the hardware file says about the engine."""
    names = (
        "kv_tokens",
        "block_tokens",
        "max_running",
        "max_batch_tokens",
        "max_context_tokens",
        "report_every_steps",
    )
    return {name: str(getattr(hardware, name)) for name in names}


def _settings(hardware: Hardware) -> dict[str, str]:
    """Section `emulation`: costs, and what section `worker` does not have."""
    costs = (name for name in EmulationConfig.model_fields if name.endswith("_s"))
    return {
        "hardware": hardware.name,
        **{name: repr(getattr(hardware.cost, name)) for name in costs},
        "host_tokens": str(hardware.host_tokens),
        "attends_padding": str(hardware.attends_padding).lower(),
    }


def _lengths(file: str, model: str, chat_template: str | None) -> dict[str, str]:
    if not file:
        return {}
    path = str(Path(file).expanduser().absolute())
    _check_lengths(path)
    return {"lengths_file": path, "frame": json.dumps(chat_frame(model, chat_template or ""))}


@cache
def _check_lengths(path: str) -> None:
    """Reports a mistake in the file before anything starts."""
    read_lengths(Path(path))


@cache
def chat_frame(model: str, chat_template: str = "") -> tuple[str, str]:
    """Returns what the chat template writes before and after the last user message of any
    conversation; empty texts if there is no template."""
    text = Text(model, chat_template)
    heads, tails = [], []
    for messages in CONVERSATIONS:
        try:
            rendered = text.decode(text.encode_chat(messages), skip_special_tokens=False)
        except TemplateError:  # templates may refuse a system message
            continue
        head, _, tail = rendered.rpartition(MESSAGE)
        heads.append(head)
        tails.append(tail)
    if not heads:
        return "", ""
    opening = _common_end(heads)
    return (opening if opening.strip() else heads[0]), tails[0]


def _common_end(texts: Sequence[str]) -> str:
    """The longest text with which all of these end."""
    shortest = min(texts, key=len)
    ends = (shortest[at:] for at in range(len(shortest) + 1))
    return next(end for end in ends if all(text.endswith(end) for text in texts))
