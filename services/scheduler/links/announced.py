"""Which addresses a worker may announce, by its certificate or token. Pure."""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import unquote

from services.runtime.errors import InvalidArgument
from services.runtime.network.channel import is_loopback

UNIX = "unix:"
SHOWN = 8  # names, in the refusal


def check_announced(address: str, names: Collection[str], peer: str) -> None:
    """Raises InvalidArgument unless a worker may announce that gateways reach it at the address.

    `names` are those of its verified certificate, or of its token; without any, it may announce any
    address. The host must be among them. A Unix socket must be on the scheduler's machine: `peer`
    is the address from which the worker connects, as gRPC writes it.
    """
    if not names:
        return
    if address.startswith(UNIX):
        if not is_loopback(unquote(peer).partition(":")[2]):
            raise InvalidArgument("address", f"{address} is on another machine; give host:port")
        return
    host = address.rpartition(":")[0].strip("[]")
    if not any(_covers(name, host) for name in names):
        raise InvalidArgument(
            "address",
            f"the worker's certificate or token does not let it announce {host!r}, only "
            f"{', '.join(sorted(names)[:SHOWN])}: set worker.advertise to one of these, or add the "
            "host to the certificate, as `foretoken certs --host` does, or name the token by it",
        )


def _covers(name: str, host: str) -> bool:
    """Whether a name is the host's. `*.` stands for one label."""
    try:
        return ip_address(name) == ip_address(host)
    except ValueError:
        name, host = name.lower(), host.lower()
    if name.startswith("*."):
        label, _, domain = host.partition(".")
        return bool(label) and domain == name.removeprefix("*.")
    return name == host
