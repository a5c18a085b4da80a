"""Configuration: frozen settings, validated when they are loaded. An unknown key is an error.

Sources in order of precedence: `--set section.key=value`, the environment
(`FORETOKEN_<SECTION>_<KEY>`, and the short names below), and the defaults in each config.py.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

ENV_PREFIX = "FORETOKEN_"
COMMON = ("tracing", "logging", "tls")  # sections of every process
SECTIONS = (
    "gateway",
    "scheduler",
    "predictor",
    "batcher",
    "estimator",
    "worker",
    "emulation",
    "backend",
    "log",
    *COMMON,
)

# Sections of what `foretoken serve` does not start: the scheduler inside vLLM, the endpoint picker.
HOSTED = ("vllm", "picker")

# Short environment variables and the sections and keys that each sets; the later of two wins.
SHORT_NAMES = {
    "FORETOKEN_API_KEYS": (("gateway", "api_keys"),),
    "FORETOKEN_API_KEY": (("gateway", "api_keys"),),
    "FORETOKEN_POLICY": (("scheduler", "policy"), ("vllm", "policy")),
}


class ConfigError(ValueError):
    """A mistake in the configuration: one line that names the key and a correct value."""


class Settings(BaseModel):
    """Base of every section. `section` is its name in `--set` and the environment; the values of
    `secret` keys never appear in errors.

    pydantic-settings is not used because it ignores variables with the prefix that match no field;
    a typo must be an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    section: ClassVar[str]
    secret: ClassVar[frozenset[str]] = frozenset()


def _split_names(value: object) -> object:
    """Splits `a,b` of a command line; passes a list through."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


Listed = Annotated[tuple[str, ...], BeforeValidator(_split_names)]  # names: `a,b`, or a JSON list

SettingsT = TypeVar("SettingsT", bound=Settings)


def load(
    kind: type[SettingsT],
    overrides: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> SettingsT:
    """Builds a section from overrides, the environment, and parsed `defaults` of a file, which
    replace those of the section. Raises ConfigError."""
    given = {**_from_environment(kind), **(overrides or {})}
    for key in (*given, *(defaults or {})):
        _require_known(kind.section, key, kind.model_fields)
    parsed = {key: _decode(f"{kind.section}.{key}", value) for key, value in given.items()}
    values = {**(defaults or {}), **parsed}
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([kind.section, *map(str, first["loc"])])
        # an error without a location concerns all fields, including secret ones
        hidden = not first["loc"] or first["loc"][0] in kind.secret
        got = "" if hidden else f" (got {first['input']!r})"
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{key}: {message}{got}") from None


def parse_sets(items: Iterable[str], sections: Iterable[str]) -> dict[str, dict[str, str]]:
    """Groups `section.key=value` strings by section, with an entry for each of `sections`. Raises
    ConfigError."""
    parsed: dict[str, dict[str, str]] = {section: {} for section in sections}
    for item in items:
        name, equals, value = item.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and key):
            raise ConfigError(f"--set takes section.key=value, got {item!r}")
        _require_known("", section, parsed)
        parsed[section][key] = value
    return parsed


def check_environment() -> None:
    """Raises ConfigError for a FORETOKEN_ variable that belongs to no section."""
    for name in os.environ:
        section = name.removeprefix(ENV_PREFIX).partition("_")[0].lower()
        known = (*SECTIONS, *HOSTED)
        if name.startswith(ENV_PREFIX) and section not in known and name not in SHORT_NAMES:
            hint = _hint(section, known)
            raise ConfigError(f"environment variable {name} belongs to no config section{hint}")


def _from_environment(kind: type[Settings]) -> dict[str, str]:
    prefix = f"{ENV_PREFIX}{kind.section}_".upper()
    short = {
        key: os.environ[name]
        for name, targets in SHORT_NAMES.items()
        for section, key in targets
        if section == kind.section and name in os.environ
    }
    return short | {
        name[len(prefix) :].lower(): value
        for name, value in os.environ.items()
        if name.startswith(prefix)
    }


def _require_known(section: str, key: str, known: Iterable[str]) -> None:
    names = sorted(known)
    if key not in names:
        what = f"config key {section}.{key}" if section else f"config section {key!r}"
        raise ConfigError(f"unknown {what}{_hint(key, names)}; known: {', '.join(names)}")


def _hint(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def _decode(key: str, value: str) -> Any:
    """Parses lists and tables as JSON; pydantic parses everything else from the string."""
    try:
        return json.loads(value, object_pairs_hook=_table) if value[:1] in ("{", "[") else value
    except ValueError as error:
        raise ConfigError(f"{key}: {error} (got {value!r})") from None


def _table(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a name that it has twice, of which one would be lost."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice; give it once")
    return table
