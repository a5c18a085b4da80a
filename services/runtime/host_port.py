"""Addresses of a host and a port, as text."""


def join(host: str, port: int | str) -> str:
    """`host:port`, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
