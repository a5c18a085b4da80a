"""Opens channels to other services, with this process's identity where it has one."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from grpc import aio

from services.runtime.network.channel import OPTIONS, Options, connect
from services.runtime.network.identity import (
    AnyIdentity,
    Identity,
    Role,
    channel_credentials,
    dns_name,
)
from services.runtime.network.leader_channel import leader_target
from services.runtime.network.tls_files import Material
from services.runtime.network.token_identity import TokenIdentity

KEPT = 2  # earlier channels: their streams go on after a change of certificate


@dataclass(frozen=True, slots=True)
class Connector:
    """Without an identity, and to Unix sockets, channels are plain."""

    identity: AnyIdentity | None = None

    def connect(self, address: str, role: Role | None = None) -> aio.Channel:
        """A channel to a server of the role, which its certificate must have; None: of any
        role."""
        return self._open(address, OPTIONS, role)

    def connect_to_peer(self, peer: str) -> aio.Channel:
        """A channel to `ROLE=ADDRESS`, or to an address, of any role. Raises ValueError."""
        role, address = parse_peer(peer)
        return self.connect(address, role)

    def connect_to_leader(self, address: str) -> aio.Channel:
        """A channel to the scheduler that leads among the addresses. Raises ValueError."""
        return self._open(*leader_target(address), Role.SCHEDULER)

    def _open(self, target: str, options: Options, role: Role | None) -> aio.Channel:
        identity = None if target.startswith("unix:") else self.identity
        match identity:
            case Identity():
                return cast(aio.Channel, _RenewedChannel(target, options, identity, role))
            case TokenIdentity():
                return cast(aio.Channel, _TokenChannel(connect(target, options), identity, role))
            case None:
                return connect(target, options)


PLAIN = Connector()


def parse_peer(peer: str) -> tuple[Role | None, str]:
    """The role, if it is given, and the address. Raises ValueError for another word before `=`."""
    word, separator, address = peer.partition("=")
    if not separator or peer.startswith("unix:"):
        return None, peer
    if word not in tuple(Role):
        raise ValueError(f"{word!r} is no role; write ADDRESS or ROLE=ADDRESS")
    return Role(word), address


class _CallingChannel(ABC):
    """The interface of a channel over `_method`, which makes the callable of a method."""

    def unary_unary(self, method: str, *codecs: Any, **more: Any) -> Callable[..., Any]:
        return self._method("unary_unary", method, codecs, more)

    def unary_stream(self, method: str, *codecs: Any, **more: Any) -> Callable[..., Any]:
        return self._method("unary_stream", method, codecs, more)

    def stream_stream(self, method: str, *codecs: Any, **more: Any) -> Callable[..., Any]:
        return self._method("stream_stream", method, codecs, more)

    @abstractmethod
    def _method(self, kind: str, method: str, codecs: Any, more: Any) -> Callable[..., Any]: ...


class _TokenChannel(_CallingChannel):
    """A channel that sends the present token for the server's role with each call."""

    def __init__(self, channel: aio.Channel, identity: TokenIdentity, role: Role | None):
        self._channel, self._identity, self._role = channel, identity, role

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def _method(self, kind: str, method: str, codecs: Any, more: Any) -> Callable[..., Any]:
        inner = getattr(self._channel, kind)(method, *codecs, **more)

        def call(
            *args: Any, metadata: Sequence[tuple[str, str]] | None = None, **options: Any
        ) -> Any:
            sent = (*(metadata or ()), *self._identity.metadata(self._role))
            return inner(*args, metadata=sent, **options)

        return call


class _RenewedChannel(_CallingChannel):
    """A channel that is opened again for the first call after a change of certificate. Streams stay
    on the channel on which they began, until the certificate has changed `KEPT` times more."""

    def __init__(self, target: str, options: Options, identity: Identity, role: Role | None):
        self._target, self._identity = target, identity
        self._options = [*options, ("grpc.ssl_target_name_override", dns_name(role))]
        self._earlier: deque[aio.Channel] = deque(maxlen=KEPT)
        self._calls: dict[tuple[str, str], Callable[..., Any]] = {}
        self._material, self._channel = self._renew()

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for channel in (*self._earlier, self._channel):
            await channel.close(grace)

    def _method(self, kind: str, method: str, codecs: Any, more: Any) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            channel = self._current()
            if (kind, method) not in self._calls:
                self._calls[kind, method] = getattr(channel, kind)(method, *codecs, **more)
            return self._calls[kind, method](*args, **options)

        return call

    def _current(self) -> aio.Channel:
        if self._identity.material() is not self._material:
            self._earlier.append(self._channel)
            self._calls.clear()
            self._material, self._channel = self._renew()
        return self._channel

    def _renew(self) -> tuple[Material, aio.Channel]:
        now = self._identity.material()
        credentials = channel_credentials(now)
        return now, aio.secure_channel(self._target, credentials, options=self._options)
