"""`foretoken tokens`: makes token files for the services of a deployment."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from foretoken.commands.usage import UsageError

TOKEN_BYTES = 32


def make_token_files(folder: Path) -> Sequence[str]:
    """Writes ROLE.tokens of each role, its own token first, then those of the roles that call it.
    Returns the names of the files. Raises OSError, also if a file exists."""
    from services.runtime.network.authorisation import callers_of
    from services.runtime.network.identity import Role

    lines = {role: f"{role}:{secrets.token_hex(TOKEN_BYTES)}\n" for role in Role}
    files = {role: folder / f"{role}.tokens" for role in Role}
    for path in files.values():
        if path.exists():
            raise FileExistsError(f"{path} exists")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for role, path in files.items():
        callers = sorted(callers_of(role) - {role})
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.writelines(lines[each] for each in (role, *callers))
    return [path.name for path in files.values()]


def tokens(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the files.")],
) -> None:
    """Make a token file of each service, for a network that encrypts.

    A service needs tls.token_file=DIR/ROLE.tokens: the file has its own token and
    those of its callers. Files that exist are not replaced.
    """
    try:
        files = make_token_files(folder)
    except OSError as error:
        raise UsageError(f"cannot make token files in {folder}: {error}") from None
    print(f"{folder}: {', '.join(files)}")
