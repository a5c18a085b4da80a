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
    """Writes ROLE.tokens of each role, with a token for each role that it calls or that calls it.
    Returns the names of the files. Raises OSError, also if a file exists."""
    from services.runtime.network.authorisation import callers_of
    from services.runtime.network.identity import Role

    lines: dict[Role, list[str]] = {role: [] for role in Role}
    for server in Role:
        for caller in sorted(callers_of(server)):
            token = secrets.token_hex(TOKEN_BYTES)
            lines[server].append(f"{caller}:{token}\n")
            lines[caller].append(f"{server}:{token}\n")
    files = {folder / f"{role}.tokens": content for role, content in lines.items()}
    for path in files:
        if path.exists():
            raise FileExistsError(f"{path} exists")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, content in files.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(path, flags, 0o600), "w") as file:
            file.writelines(content)
    return [path.name for path in files]


def tokens(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the files.")],
) -> None:
    """Make a token file of each service, for a network that encrypts.

    A service needs tls.token_file=DIR/ROLE.tokens: it shares a token with each role
    that it calls or that calls it. Files that exist are not replaced.
    """
    try:
        files = make_token_files(folder)
    except OSError as error:
        raise UsageError(f"cannot make token files in {folder}: {error}") from None
    print(f"{folder}: {', '.join(files)}")
