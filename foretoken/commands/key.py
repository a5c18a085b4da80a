"""`foretoken key`: creates an API key and its line for the key file."""

import sys
from typing import Annotated

import typer

from foretoken.commands.usage import UsageError


def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Owner of the key, shown in logs.")],
) -> None:
    """Create an API key: the key on stderr, its line for --api-key-file on stdout.

    The line holds a hash; the key cannot be recovered from it.
    """
    from gateway.types.api_keys import NAME, hash_key, new_key

    if not NAME.fullmatch(name):
        raise UsageError(
            f"a key name has at most 64 letters, digits, dots, dashes or underscores; got {name!r}"
        )
    secret = new_key()
    print(secret, file=sys.stderr)
    print(f"{name}:{hash_key(secret)}")
