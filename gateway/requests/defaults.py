"""Sampling defaults from a model's generation_config.json."""

from pathlib import Path

from gateway.requests.sampling import find_range_fault
from gateway.requests.text import read_json
from services.runtime.config import ConfigError

# The fields that vLLM reads. As in vLLM, `do_sample: false` alone has no effect.
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: str) -> dict[str, float]:
    """The defaults of a model folder; empty without the file or without sampling fields.

    Raises ConfigError naming the file and the field for an invalid value.
    """
    path = Path(model) / "generation_config.json"
    content = read_json(path)
    given = {field: content[field] for field in FIELDS if content.get(field) is not None}
    for field, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fault = find_range_fault(field, value) if number else f"must be a number, not {value!r}"
        if fault:
            raise ConfigError(
                f"gateway.model: {path}: {field} {fault}; correct it, or set "
                "gateway.generation_config=off"
            )
    return given
