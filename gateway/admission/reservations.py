"""Reservations of what requests may use of their keys' limits: of this gateway's, or of limits that
it shares with others."""

import time
from collections.abc import Sequence
from typing import Protocol

from gateway.admission.key_limits import Grant, KeyLimiter
from gateway.config import GatewayConfig
from services.runtime.config import ConfigError


class Reservations(Protocol):
    """Takes what admitted requests may use."""

    @property
    def shared(self) -> bool | None:
        """Whether the limits are shared now; None if they never are."""
        ...

    async def reserve(self, key: str, tokens: Sequence[int], drain_s: float) -> Grant | None:
        """As KeyLimiter.reserve."""
        ...

    async def run(self) -> None: ...


class LocalReservations:
    """The limits are those of this gateway."""

    shared = None

    def __init__(self, keys: KeyLimiter):
        self._keys = keys

    async def reserve(self, key: str, tokens: Sequence[int], drain_s: float) -> Grant | None:
        return self._keys.reserve(key, tokens, time.monotonic(), drain_s)

    async def run(self) -> None:
        """Does nothing."""


def open_reservations(config: GatewayConfig, keys: KeyLimiter) -> Reservations:
    """Those that the settings describe. Raises ConfigError for an unusable URL."""
    if not config.limits_url:
        return LocalReservations(keys)
    from gateway.admission.shared_limits import SharedLimits  # takes 0.15 s

    url, name, wait_s = config.limits_url, config.limits_name, config.limits_wait_s
    try:
        return SharedLimits(keys, url, name, wait_s, max(1, config.replicas))
    except ValueError as error:
        raise ConfigError(str(error)) from None
