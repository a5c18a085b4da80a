"""Keys of full KV blocks: requests with equal keys can share a block.

Workers find cached blocks by key. Gateways describe the first blocks of a prompt by hashes of the
keys, and the scheduler places requests by them.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b, sha256
from struct import pack, unpack

KEY_BYTES = 16  # a collision would mix the KV of two requests; one is likely after 2^64 blocks
# Hashes of cached blocks that a worker has reported and the scheduler keeps: 400 kB per worker.
MAX_REPORTED_PREFIXES = 16_384
MAX_PREFIX_CHANGES = 4_096  # hashes in one report: 32 kB
HASH_BYTES = 8  # a collision only makes a placement worse


def owned_salt(owner: str, salt: str) -> str:
    """The salt within the cached prefixes of an owner, such as an API key: no other owner can name
    it. An empty owner is common to all."""
    if not owner:
        return salt
    return sha256(f"{owner}\0{salt}".encode(errors="surrogatepass")).hexdigest()


def key_salt(cache_salt: str, adapter: str) -> str:
    """The salt of a request's keys: an adapter changes the KV of the same tokens."""
    return f"{cache_salt}\0{adapter}" if adapter else cache_salt


def extend_keys(
    keys: list[bytes], tokens: Sequence[int], blocks: int, block_tokens: int, salt: str
) -> None:
    """Appends keys until `keys` covers the first `blocks` full blocks of `tokens`.

    A key depends on the salt and on all tokens up to the end of its block. Requests with different
    salts share no blocks, so timing does not reveal the prompts of others. O(tokens hashed).
    """
    parent = keys[-1] if keys else salt.encode()
    for index in range(len(keys), blocks):
        block = array("I", tokens[index * block_tokens : (index + 1) * block_tokens])
        person = b"root" if index == 0 else b"block"
        parent = blake2b(parent + block.tobytes(), digest_size=KEY_BYTES, person=person).digest()
        keys.append(parent)


def hash_of(key: bytes) -> int:
    """The key truncated to a signed 64-bit number; never 0, which means no block."""
    return int.from_bytes(key[:HASH_BYTES], "little", signed=True) or 1


def prompt_hashes(tokens: Sequence[int], most: int, block_tokens: int, salt: str) -> list[int]:
    """Hashes of the prompt's first `most` full blocks, without the block of its last token, which
    is always computed. About 1 µs per block."""
    keys: list[bytes] = []
    extend_keys(keys, tokens, min(most, (len(tokens) - 1) // block_tokens), block_tokens, salt)
    return [hash_of(key) for key in keys]


def encode_hashes(hashes: Sequence[int]) -> bytes:
    """Little-endian, 8 bytes each."""
    return pack(f"<{len(hashes)}q", *hashes)


def decode_hashes(data: bytes, most: int) -> tuple[int, ...]:
    """The first `most` hashes; none if the bytes are not valid hashes."""
    count = min(most, len(data) // HASH_BYTES)
    found = unpack(f"<{count}q", data[: count * HASH_BYTES])
    return () if len(data) % HASH_BYTES or 0 in found else found
