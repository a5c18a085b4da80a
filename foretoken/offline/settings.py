"""The settings of `foretoken.LLM`: those options of `foretoken serve` that concern the engine."""

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TypedDict

from foretoken.running.engines import ENGINES, OWN
from foretoken.running.model import locate, require_servable
from foretoken.running.options import ServeOptions, demo_model


class Settings(TypedDict, total=False):
    """The options of `foretoken serve` that concern the engine, under the same names. `sets` are
    `section.key=value`, as of `--set`."""

    served_model_name: str
    engine: str
    max_model_len: int
    dtype: str
    quantization: str
    speculative_tokens: int
    device: str
    tensor_parallel: int
    chat_template: str
    policy: str
    presets: str
    kv_tokens: int
    kv_dtype: str
    host_gib: float | None
    backends: Sequence[str]
    backend_key: str
    emulate: str
    emulate_lengths: str
    workers: int
    state_dir: str
    log_level: str
    sets: Sequence[str]


def read_settings(model: str, settings: Settings) -> ServeOptions:
    """The options of a system for a folder or hub name; an empty one is the demo model. Unknown
    request fields are refused. Raises ValueError that names the setting."""
    known = Settings.__annotations__
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"LLM has no setting {name!r}; {hint}")
    engine = settings.get("engine", OWN)
    if engine not in ENGINES:
        raise ValueError(f"engine: one of {', '.join(ENGINES)}, not {engine!r}")
    options = ServeOptions(**settings)
    sets = ["gateway.unknown_fields=refuse", *options.sets]
    if not model:
        return replace(options, model=demo_model(), sets=sets)
    located = locate(model)
    require_servable(model, located.folder, ENGINES[engine].ours and not options.emulate)
    name = options.served_model_name or located.name
    return replace(options, model=located.folder, served_model_name=name, sets=sets)
