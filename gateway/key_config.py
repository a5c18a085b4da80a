"""Settings of API keys: their limits, what they share, and the audit log of their requests."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from gateway.types.api_keys import NAME, name_keys
from gateway.types.key_limits import KeyLimits
from services.runtime.config import Listed
from services.runtime.main import ServedSettings

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
ALL_KEYS = "*"


class KeySettings(ServedSettings):
    """A part of section `gateway`."""

    # Without keys, the server accepts every request that reaches its ports. A key's name is the
    # tenant of requests without cache_salt and user. Keys with the same name share cached prefixes,
    # others do not. The environment variable FORETOKEN_API_KEY(S) sets api_keys, too.
    api_keys: Listed = Field(
        default=(), repr=False
    )  # plain keys, each named key- and 8 digits of its hash
    api_key_file: str = ""  # lines name:sha256hex, `#` begins a comment; reread when it changes
    # Names of keys that share cached prefixes with each other; `*`: all keys. By timing, one can
    # learn whether another has sent a prompt.
    shared_prefixes: Listed = ()
    # Limits of keys by their names; `*`: of each other key. JSON: {"ada": {"requests_per_minute":
    # 60, "tokens_per_minute": 100000, "concurrent_requests": 4, "queued_tokens": 20000, "weight":
    # 2, "sla_classes": ["batch"]}}. More: 429; another class: 400.
    key_limits: dict[str, KeyLimits] = Field(default_factory=dict)
    # Of an answer's max_tokens, the most that are reserved of a key's tokens until its length is
    # forecast.
    key_reserve_tokens: Count = 1024
    # The quantile of the forecast that is reserved then: this share of answers is not longer.
    key_reserve_quantile: Annotated[float, Field(gt=0, lt=1)] = 0.95
    # Gateways of the same keys share their limits in Redis.
    # redis://[user:password@]host[:port][/database]; empty: each gateway keeps to its own.
    limits_url: str = Field(default="", repr=False)
    # One for each group of gateways.
    limits_name: str = Field(default="foretoken:limits", min_length=1)
    # For Redis to answer. Without an answer, the gateway keeps to its part of the limits until
    # Redis is back. Redis takes 1 ms; the rest is for an event loop that is busy.
    limits_wait_s: Positive = 0.1
    # Folder of the audit log: a JSON line for each answered request and each refusal by a limit,
    # with the key's name, ids and counts, without texts. Each gateway writes a file of its own.
    # Empty: none.
    audit_folder: str = ""
    audit_file_mb: Count = 100  # of a file, after which the gateway begins another
    # Of a gateway; the oldest is deleted.
    audit_files: Annotated[int, Field(ge=2)] = 10

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        name_keys(keys)
        return keys

    @field_validator("api_key_file")
    @classmethod
    def _check_key_file(cls, path: str) -> str:
        if path and not Path(path).is_file():
            raise ValueError("the file does not exist; create it with `foretoken key NAME`")
        return path

    @field_validator("shared_prefixes")
    @classmethod
    def _check_shared_prefixes(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        _check_key_names(names)
        return names

    @field_validator("key_limits")
    @classmethod
    def _check_limited_keys(cls, limits: dict[str, KeyLimits]) -> dict[str, KeyLimits]:
        _check_key_names(limits)
        return limits

    def shares_prefixes(self, key_name: str) -> bool:
        """Whether the prefixes of a key's requests are common to all keys that share. O(names)."""
        return key_name in self.shared_prefixes or ALL_KEYS in self.shared_prefixes


def _check_key_names(names: Iterable[str]) -> None:
    for name in names:
        if name != ALL_KEYS and not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a key's name; write the names of keys, or *")
