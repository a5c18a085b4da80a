"""What vLLM's pool of blocks holds, for models with one or several groups of KV layers."""

from collections.abc import Iterable
from fractions import Fraction


def whole_units(blocks: int, unit_tokens: int, group_block_tokens: Iterable[int]) -> int:
    """Units of `unit_tokens` tokens that fit into a pool of `blocks`, from which each group of
    layers takes a block for every `group_block_tokens` tokens of a request.

    Exact for groups that keep all tokens. Groups with a sliding window keep fewer of a long
    request: more fits than this.
    """
    per_unit = sum(Fraction(unit_tokens, each) for each in group_block_tokens) or Fraction(1)
    return int(blocks / per_unit)
