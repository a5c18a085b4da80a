"""API keys, stored as hashes with names. Pure, except that `new_key` is random."""

import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from services.runtime.errors import Code, ServiceError

PREFIX = "ft-"
KEY_BYTES = 32  # random: long enough that a plain hash protects the key
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
HASH = re.compile(r"[0-9a-f]{64}")
SHOWN_CHARS = 4  # of a wrong key, so that its owner recognizes it
MIN_SHOWN_KEY_CHARS = 12  # shorter keys are masked completely


class KeyFault(ValueError):
    """What is wrong with a key or a key file; names the place, never the key."""


class Unauthenticated(ServiceError):
    """The request has no key or an unknown one. The wording is OpenAI's."""

    def __init__(self, given: str):
        """`given`: the received key, empty without one."""
        message = (
            f"Incorrect API key provided: {mask_key(given)}. Ask the operator of this server for a "
            "key."
            if given
            else "You didn't provide an API key. You need to provide your API key in an "
            "Authorization header using Bearer auth (i.e. Authorization: Bearer YOUR_KEY)."
        )
        super().__init__(Code.UNAUTHENTICATED, message)
        self.given = bool(given)


def new_key() -> str:
    """A random key for a client. Only its hash is stored."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """64 hex digits, as in a key file."""
    return sha256(key.encode(errors="surrogateescape")).hexdigest()


def mask_key(key: str) -> str:
    """The key without all but its last characters."""
    return "*" * 4 + (key[-SHOWN_CHARS:] if len(key) >= MIN_SHOWN_KEY_CHARS else "")


@dataclass(frozen=True, slots=True)
class NamedHash:
    """A stored key. Several may share a name, such as the old and the new key of a rotation."""

    name: str
    hash: str = field(repr=False)


def read_key_file(text: str) -> Sequence[NamedHash]:
    """Parses lines `name:sha256hex`; a `#` begins a comment. Raises KeyFault."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [_read_line(at, line) for at, line in enumerate(lines, 1) if line]


def name_keys(keys: Iterable[str]) -> Sequence[NamedHash]:
    """Hashes plain keys and names each by the beginning of its hash, so that a key's name does not
    depend on other keys. Raises KeyFault."""
    named = []
    for key in keys:
        if not key.strip() or key != key.strip():
            raise KeyFault("an API key is empty, or begins or ends with a blank")
        digest = hash_key(key)
        named.append(NamedHash(f"key-{digest[:8]}", digest))
    return named


def find_name(key: str, known: Iterable[NamedHash]) -> str:
    """The name of a key, empty for an unknown one. Compares with every known key, so that the time
    does not depend on the match."""
    digest, found = hash_key(key), ""
    for each in known:
        if hmac.compare_digest(digest, each.hash):
            found = each.name
    return found


def parse_bearer(authorization: str) -> str:
    """The key in an Authorization header; empty without one."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _read_line(at: int, line: str) -> NamedHash:
    name, colon, digest = (part.strip() for part in line.partition(":"))
    if not (colon and NAME.fullmatch(name)):
        raise KeyFault(f"line {at}: must be name:hash, a name of letters, digits, '.', '_' and '-'")
    if not HASH.fullmatch(digest.lower()):
        raise KeyFault(f"line {at}: the hash of {name} must be 64 hex digits, the key's SHA-256")
    return NamedHash(name, digest.lower())
