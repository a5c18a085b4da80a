"""What a model asks to be sampled with, where a request does not say: generation_config.json."""

import json
from pathlib import Path

from gateway.requests.sampling import fault_of
from services.runtime.config import ConfigError

# As vLLM takes them; `do_sample: false` alone changes nothing there either.
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(model: str) -> dict[str, float]:
    """Of a model's folder; empty where it has no such file or that says nothing of sampling.

    Raises ConfigError, one line that names the file and the field, for what can't be meant.
    """
    path = Path(model) / "generation_config.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"gateway.model: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"gateway.model: {path} is not a JSON object")
    given = {field: content[field] for field in FIELDS if content.get(field) is not None}
    for field, value in given.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fault = fault_of(field, value) if number else f"must be a number, not {value!r}"
        if fault:
            raise ConfigError(
                f"gateway.model: {path}: {field} {fault}; mend it, or set "
                "gateway.generation_config=off"
            )
    return given
