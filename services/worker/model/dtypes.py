"""In which numbers a model computes on a CPU: float32, unless it is asked for what is faster here.

`auto` is not measured: two starts, or two workers of one model, could come out otherwise, and their
answers differ. Who asks for `fastest` says that this may be.
"""

from time import perf_counter

import torch
from transformers import AutoConfig

SIZE = 1_024  # of the matrix that is multiplied: 4 MiB in float32, more than a core's own cache
ROWS = (1, 64)  # streams, alone and many
REPEATS = 5
GAIN = 1.2  # bfloat16 must be faster by that, for both: its answers are a little less exact


def dtype_of(name: str, device: torch.device, asked: str) -> str:
    """What `from_pretrained` is to load; its `auto` is the checkpoint's own. `fastest` of a CPU is
    bfloat16 where the checkpoint is that, so that nothing is rounded, and it measures faster."""
    if asked not in ("auto", "fastest"):
        return asked
    if device.type != "cpu":
        return "auto"
    if asked == "auto":
        return "float32"
    own = AutoConfig.from_pretrained(name).get_text_config().dtype
    return "bfloat16" if own is torch.bfloat16 and bfloat16_gains() else "float32"


def bfloat16_gains() -> bool:
    """Whether bfloat16 is faster here, at one row and at many. Takes some 10 ms."""
    return all(_took_s(torch.float32, rows) > GAIN * _took_s(torch.bfloat16, rows) for rows in ROWS)


def _took_s(dtype: torch.dtype, rows: int) -> float:
    """The shortest of some, the first of which prepares the library."""
    x, weights = torch.ones(rows, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)
    shortest_s = float("inf")
    for _ in range(1 + REPEATS):
        began_s = perf_counter()
        torch.nn.functional.linear(x, weights)
        shortest_s = min(shortest_s, perf_counter() - began_s)
    return shortest_s
