"""Contents of prompts: which prompts share their first tokens."""

from collections.abc import Sequence

import numpy as np

from simulator.workload.content import HASH_TOKENS, contents_of
from simulator.workload.workload import Workload


def made(
    inputs: list[int], hash_ids: Sequence[list[int]] = (), prompts: Sequence[str] = ()
) -> Workload:
    count = len(inputs)
    return Workload(
        "made", np.zeros(count), np.array(inputs), np.ones(count, int), (), prompts, hash_ids
    )


def common(one: list[int], other: list[int]) -> int:
    """Tokens until the contents differ."""
    equal = np.array(one[: len(other)]) == np.array(other[: len(one)])
    return len(equal) if equal.all() else int(np.argmin(equal))


def test_prompts_with_the_same_first_hashes_share_these_blocks():
    content = contents_of(made([1_200, 1_300, 600], [[0, 1, 2], [0, 1, 3], [4]]))
    assert content is not None
    one, other, third = content(0), content(1), content(2)
    assert [len(one), len(other), len(third)] == [1_200, 1_300, 600]
    assert common(one, other) == 2 * HASH_TOKENS
    assert common(one, third) == 0
    assert third[HASH_TOKENS:] == [third[-1]] * 88  # beyond its hashes, of its own


def test_prompts_with_the_same_first_text_share_its_tokens():
    system = "Answer briefly and name your sources. " * 10
    texts = [system + "What is a lease?", system + "How does a batch end?", "Something else."]
    inputs = [len(text) // 4 for text in texts]
    content = contents_of(made(inputs, prompts=texts))
    assert content is not None
    assert common(content(0), content(1)) == len(system) // 4
    assert common(content(0), content(2)) == 0
    assert [len(content(row)) for row in range(3)] == inputs


def test_workload_without_hashes_and_texts_has_no_contents():
    assert contents_of(made([10])) is None
