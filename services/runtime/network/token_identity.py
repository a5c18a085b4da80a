"""The identity of a process towards the other services where a mesh encrypts: a shared token.

Each call carries it as metadata. The token says that a process belongs to the deployment, and not
which role it has.
"""

import os
import stat
from collections.abc import Sequence
from functools import partial
from hmac import compare_digest
from pathlib import Path

from services.runtime.config import ConfigError
from services.runtime.network.watched_files import WatchedFiles

TOKEN_KEY = "foretoken-token"  # of the metadata
MIN_TOKEN_CHARS = 32  # 128 bits in hexadecimal digits
MAX_FILE_BYTES = 4_096
MAX_TOKENS = 8  # a rotation needs two


class TokenIdentity:
    """The tokens in a file, one a line, as it is now: the first is sent, all are accepted."""

    def __init__(self, file: str):
        """Raises ConfigError if the file is missing or wrong."""
        path = Path(file)
        self._tokens = WatchedFiles([path], partial(_read, path))

    def metadata(self) -> tuple[str, str]:
        """The entry that a call to another service needs."""
        return TOKEN_KEY, self._tokens.current()[0]

    def accepts(self, token: str) -> bool:
        """Whether a caller's token is one of the file. Takes equally long for all of one length."""
        given = token.encode()
        return sum(compare_digest(given, each.encode()) for each in self._tokens.current()) > 0


def _read(path: Path) -> Sequence[str]:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from None
    if mode & stat.S_IROTH:
        raise _wrong(f"each user of this machine can read {path}: run `chmod o= {path}`")
    if len(content) > MAX_FILE_BYTES:
        raise _wrong(f"{path} has more than {MAX_FILE_BYTES} bytes")
    tokens = content.decode("ascii", errors="replace").split("\n")
    tokens = [token.strip() for token in tokens if token.strip()]
    if not 0 < len(tokens) <= MAX_TOKENS:
        raise _wrong(f"{path} must have 1 to {MAX_TOKENS} tokens, one a line, got {len(tokens)}")
    for number, token in enumerate(tokens, 1):
        if len(token) < MIN_TOKEN_CHARS or not all("!" <= char <= "~" for char in token):
            raise _wrong(
                f"token {number} of {path} must have {MIN_TOKEN_CHARS} or more letters and digits; "
                "`openssl rand -hex 32` makes one"
            )
    return tokens


def _wrong(sentence: str) -> ConfigError:
    return ConfigError(f"tls.token_file: {sentence}")
