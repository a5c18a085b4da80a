"""Keys of full blocks: what must be equal for two requests to share one."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16  # collisions would mix two answers: 2^64 blocks before one is likely


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
