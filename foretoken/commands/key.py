"""`foretoken key`: a new API key, and the line by which a server knows it."""

import sys
from typing import Annotated

import typer

from foretoken.commands.usage import UsageError


def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose it is; logs tell it.")],
) -> None:
    """Make an API key: on stderr the key, for its holder; on stdout a line for --api-key-file.

    That line holds a hash, from which nobody gets the key back.
    """
    from gateway.admission.keys import NAME, hash_key, new_key

    if not NAME.fullmatch(name):
        raise UsageError(f"a key's name is up to 64 letters, digits and ._- alone, got {name!r}")
    made = new_key()
    print(made, file=sys.stderr)
    print(f"{name}:{hash_key(made)}")
