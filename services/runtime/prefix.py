"""Keys of full blocks: what must be equal for two requests to share one.

One function for the worker, which finds blocks by them, and for gateways, which say by them how a
prompt begins. Pure.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from struct import pack, unpack

KEY_BYTES = 16  # collisions would mix two answers: 2^64 blocks before one is likely
MOST_TOLD = 16_384  # hashes that a worker tells of at a time, and its scheduler keeps: 400 kB
MOST_NEWS = 4_096  # in a report: 32 kB
HASH_BYTES = 8  # of a key, where a collision costs no more than a worse place


def extend_keys(
    keys: list[bytes], tokens: Sequence[int], blocks: int, block_tokens: int, salt: str
) -> None:
    """Append keys until `keys` names the first `blocks` full blocks of `tokens`.

    A key covers all tokens before and in its block, and the salt: requests of different salts
    can neither share blocks nor learn from timing whether another has asked the same. O(tokens
    hashed), each block once.
    """
    parent = keys[-1] if keys else salt.encode()
    for index in range(len(keys), blocks):
        block = array("I", tokens[index * block_tokens : (index + 1) * block_tokens])
        person = b"root" if index == 0 else b"block"
        parent = blake2b(parent + block.tobytes(), digest_size=KEY_BYTES, person=person).digest()
        keys.append(parent)


def hash_of(key: bytes) -> int:
    """A key cut to a signed 64-bit number, never 0, which stands for no block."""
    return int.from_bytes(key[:HASH_BYTES], "little", signed=True) or 1


def prompt_hashes(tokens: Sequence[int], most: int, block_tokens: int, salt: str) -> list[int]:
    """Of the first `most` blocks of a prompt that it could share: its last token is always
    computed. About a microsecond a block."""
    keys: list[bytes] = []
    extend_keys(keys, tokens, min(most, (len(tokens) - 1) // block_tokens), block_tokens, salt)
    return [hash_of(key) for key in keys]


def encode_hashes(hashes: Sequence[int]) -> bytes:
    """Little-endian, 8 bytes each."""
    return pack(f"<{len(hashes)}q", *hashes)


def decode_hashes(data: bytes, most: int) -> tuple[int, ...]:
    """The first `most` of them; none where these can't be hashes."""
    count = min(most, len(data) // HASH_BYTES)
    found = unpack(f"<{count}q", data[: count * HASH_BYTES])
    return () if len(data) % HASH_BYTES or 0 in found else found
