"""API keys: kept as hashes, each with a name. Pure, but that a new key is drawn."""

import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from services.runtime.errors import Code, ServiceError

PREFIX = "ft-"
KEY_BYTES = 32  # drawn at random: nobody guesses it, so that a plain hash keeps it
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
HASH = re.compile(r"[0-9a-f]{64}")
SHOWN_CHARS = 4  # of a wrong key, so that its owner knows which it was
LEAST_CHARS = 12  # of one that is shown at all


class KeyFault(ValueError):
    """What is wrong with a key or a file of them; says where, and never the key."""


class Unauthenticated(ServiceError):
    """No key, or none that is good here; worded as OpenAI words it."""

    def __init__(self, given: str):
        """`given`: the key that came, empty where none did."""
        message = (
            f"Incorrect API key provided: {shown(given)}. Ask whoever runs this server for a key."
            if given
            else "You didn't provide an API key. You need to provide your API key in an "
            "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
        )
        super().__init__(Code.UNAUTHENTICATED, message)
        self.given = bool(given)


def new_key() -> str:
    """A key to hand out; what is kept of it is its hash."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """64 hex digits, as a file of keys has them."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def shown(key: str) -> str:
    """What may be told of a key: its last characters, of a long one."""
    return "*" * 4 + (key[-SHOWN_CHARS:] if len(key) >= LEAST_CHARS else "")


@dataclass(frozen=True, slots=True)
class NamedHash:
    """A key as it is kept. Several may have one name: the old and the new, while one is changed."""

    name: str
    hash: str = field(repr=False)


def read_key_file(text: str) -> Sequence[NamedHash]:
    """Of lines `name:sha256hex`; what follows a `#` is a comment. Raises KeyFault."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [_read_line(at, line) for at, line in enumerate(lines, 1) if line]


def name_keys(keys: Iterable[str]) -> Sequence[NamedHash]:
    """Keys that were given as they are, named by their hashes' beginning, so that the name of one
    depends on no other. Raises KeyFault."""
    kept = []
    for key in keys:
        if not key.strip() or key != key.strip():
            raise KeyFault("an API key is empty, or begins or ends with a blank")
        digest = hash_key(key)
        kept.append(NamedHash(f"key-{digest[:8]}", digest))
    return kept


def name_of(key: str, known: Iterable[NamedHash]) -> str:
    """Whose key it is, empty where it is nobody's. Looks at all that are known, however early one
    fits, and takes the same time for each."""
    digest, found = hash_key(key), ""
    for each in known:
        if hmac.compare_digest(digest, each.hash):
            found = each.name
    return found


def bearer(authorization: str) -> str:
    """The key within an Authorization header; empty where there is none."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _read_line(at: int, line: str) -> NamedHash:
    name, colon, digest = (part.strip() for part in line.partition(":"))
    if not (colon and NAME.fullmatch(name)):
        raise KeyFault(f"line {at}: must be name:hash, a name of letters, digits, '.', '_' and '-'")
    if not HASH.fullmatch(digest.lower()):
        raise KeyFault(f"line {at}: what follows {name}: must be 64 hex digits, a key's SHA-256")
    return NamedHash(name, digest.lower())
