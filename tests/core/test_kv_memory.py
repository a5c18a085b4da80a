"""The memory model by hand, and a batch of the size it allows against one larger."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.kv_memory import ZETA, KVMemory, batch_tokens, most_seqs, planned_tokens

GIB = 2**30


def test_an_a100_by_hand() -> None:
    """80 GiB less 26 of LLaMA2-13B's parameters and 4 of the engine leave 50. Its KV takes 2 · 40
    layers · 40 heads · 128 · 2 bytes = 819,200 a token: 65,536 tokens. ζ leaves 58,982 of them;
    batches of 512 that go on for 128 take 640 each, so 92 of them."""
    memory = KVMemory(80 * GIB, 26 * GIB, 4 * GIB, 2 * 40 * 40 * 128 * 2)
    assert memory.available_bytes == 50 * GIB
    assert memory.tokens == 65_536
    assert planned_tokens(memory.tokens) == 58_982
    assert list(most_seqs(memory.tokens, np.array([512]), 128)) == [92]
    assert list(batch_tokens(np.array([92, 93]), np.array([512]), 128)) == [58_880, 59_520]


def test_without_room_there_are_no_tokens() -> None:
    memory = KVMemory(8 * GIB, 7 * GIB, 2 * GIB, 1_000)
    assert memory.available_bytes == -GIB
    assert memory.tokens == 0


def test_blocks_are_given_whole() -> None:
    """20 + 5 tokens take two blocks of 16: of 160 tokens 144 are planned, and 4 fit, not 5."""
    assert list(batch_tokens(np.array([3]), np.array([20]), 5, 16)) == [96]
    assert list(most_seqs(160, np.array([20, 200]), 5, block_tokens=16)) == [4, 0]
    assert list(most_seqs(160, np.array([20]), 5, zeta=1.0, block_tokens=16)) == [5]


@given(
    st.integers(0, 100_000),
    st.lists(st.integers(0, 4_096), min_size=1, max_size=9),
    st.integers(1, 512),
    st.integers(1, 64),
)
def test_one_more_would_not_fit(kv: int, lengths: list[int], steps: int, block: int) -> None:
    """Eq. 9: (L + S)·N ≤ ζ·M_ava / Δ."""
    length = np.array(lengths)
    most = most_seqs(kv, length, steps, block_tokens=block)
    assert np.all(batch_tokens(most, length, steps, block) <= ZETA * kv)
    assert np.all(batch_tokens(most + 1, length, steps, block) > int(ZETA * kv))
