"""Keys of full KV blocks: equal keys mean that two requests can share a block.

One function for the worker, which finds blocks by them, and for gateways, which describe a prompt's
beginning by them. Pure.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import pack, unpack

KEY_BYTES = 16  # a collision would mix two answers: one is likely after 2^64 blocks
MOST_TOLD = 16_384  # hashes that a worker reports at a time, and its scheduler keeps: 400 kB
MOST_NEWS = 4_096  # in one report: 32 kB
HASH_BYTES = 8  # of a key; a collision only costs a worse placement


def extend_keys(
    keys: list[bytes], tokens: Sequence[int], blocks: int, block_tokens: int, salt: str
) -> None:
    """Appends keys until `keys` covers the first `blocks` full blocks of `tokens`.

    A key covers the salt and all tokens up to the end of its block: requests with different salts
    neither share blocks nor learn by timing whether another asked the same. O(tokens hashed), each
    block once.
    """
    parent = keys[-1] if keys else salt.encode()
    for index in range(len(keys), blocks):
        block = array("I", tokens[index * block_tokens : (index + 1) * block_tokens])
        person = b"root" if index == 0 else b"block"
        parent = blake2b(parent + block.tobytes(), digest_size=KEY_BYTES, person=person).digest()
        keys.append(parent)


def hash_of(key: bytes) -> int:
    """A key truncated to a signed 64-bit number, never 0, which stands for no block."""
    return int.from_bytes(key[:HASH_BYTES], "little", signed=True) or 1


def prompt_hashes(tokens: Sequence[int], most: int, block_tokens: int, salt: str) -> list[int]:
    """Hashes of the prompt's first `most` shareable blocks: its last token is always computed.
    About 1 µs per block."""
    keys: list[bytes] = []
    extend_keys(keys, tokens, min(most, (len(tokens) - 1) // block_tokens), block_tokens, salt)
    return [hash_of(key) for key in keys]


def encode_hashes(hashes: Sequence[int]) -> bytes:
    """Little-endian, 8 bytes each."""
    return pack(f"<{len(hashes)}q", *hashes)


def decode_hashes(data: bytes, most: int) -> tuple[int, ...]:
    """At most the first `most`; none if the bytes cannot be hashes."""
    count = min(most, len(data) // HASH_BYTES)
    found = unpack(f"<{count}q", data[: count * HASH_BYTES])
    return () if len(data) % HASH_BYTES or 0 in found else found
