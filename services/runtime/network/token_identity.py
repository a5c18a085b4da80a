"""The identity of a process towards the other services where a mesh encrypts: tokens.

Each call carries one as metadata. A token of a role is shared with the services of the role only: a
client sends it to them, and a server takes a caller with it for one of them.
"""

import os
import re
import stat
from collections.abc import Collection, Sequence
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import NamedTuple

from services.runtime.config import ConfigError
from services.runtime.network.watched_files import WatchedFiles

TOKEN_KEY = "foretoken-token"  # of the metadata
TOKEN_NAME = "foretoken_token_name"  # of a call's auth_context
MIN_TOKEN_CHARS = 32  # 128 bits in hexadecimal digits
MAX_FILE_BYTES = 16_384
MAX_TOKENS = 64  # two of each role in a rotation, and some of single processes
SECRET = re.compile(rf"[A-Za-z0-9+/_-]{{{MIN_TOKEN_CHARS},}}={{0,2}}")  # hexadecimal or base64
WORD = re.compile(r"[a-z]+\b")
NAME = re.compile(r"[A-Za-z0-9._:*-]{1,253}")  # of a process, or the host that a worker announces


class Token(NamedTuple):
    """A token, and with which services it is shared: those of the role, all if empty. `name`: of a
    caller with the token; empty: none."""

    secret: bytes
    role: str
    name: str


class TokenIdentity:
    """The tokens in a file, one a line, as it is now: the first for the server's role is sent, all
    are accepted."""

    def __init__(self, file: str, roles: Collection[str]):
        """`roles`: those that a line may name. Raises ConfigError if the file is missing or
        wrong."""
        path = Path(file)
        self._tokens = WatchedFiles([path], partial(_read, path, roles))

    def metadata(self, role: str | None) -> Sequence[tuple[str, str]]:
        """What a call to a server of the role needs; None: the role is not known. Empty if the file
        has no token for it."""
        for each in self._tokens.current():
            if each.role in ("", role):
                return [(TOKEN_KEY, each.secret.decode())]
        return []

    def find(self, secret: str) -> Token | None:
        """The token of the file that a caller has sent. Takes equally long for all of one
        length. O(tokens)."""
        given = secret.encode()
        found = [each for each in self._tokens.current() if compare_digest(given, each.secret)]
        return found[0] if found else None


def _read(path: Path, roles: Collection[str]) -> Sequence[Token]:
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
    lines = content.decode("ascii", errors="replace").split("\n")
    numbered = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    if not 0 < len(numbered) <= MAX_TOKENS:
        raise _wrong(f"{path} must have 1 to {MAX_TOKENS} tokens, one a line, got {len(numbered)}")
    first: dict[bytes, tuple[int, Token]] = {}  # by secret, with its line
    for number, line in numbered.items():
        token = _parse(line, f"line {number} of {path}", roles)
        before, earlier = first.setdefault(token.secret, (number, token))
        if earlier != token:
            raise _wrong(
                f"lines {before} and {number} of {path} have one token for different services; "
                "each role and name needs its own"
            )
    return [token for _, token in first.values()]


def _parse(line: str, place: str, roles: Collection[str]) -> Token:
    """Raises ConfigError. Its sentence repeats nothing of the line, which may be secret."""
    owner, colon, secret = (part.strip() for part in line.rpartition(":"))
    role, slash, name = owner.partition("/")
    if colon and role not in roles:
        raise _wrong(
            f"{place} names no role before the colon, which is one of {', '.join(sorted(roles))}; "
            "a token itself has no colon"
        )
    if not colon and (first := WORD.match(line)) and first[0] in roles:
        raise _wrong(f"{place} has no colon after its role")
    if slash and not NAME.fullmatch(name):
        raise _wrong(
            f"the name after the role in {place} must be a host name, an address, or 1 to 253 "
            "letters, digits, dots, dashes and underscores"
        )
    if not SECRET.fullmatch(secret):
        raise _wrong(
            f"the token in {place} must have {MIN_TOKEN_CHARS} or more letters and digits; "
            "`openssl rand -hex 32` makes one"
        )
    return Token(secret.encode(), role, name)


def _wrong(sentence: str) -> ConfigError:
    return ConfigError(f"tls.token_file: {sentence}")
