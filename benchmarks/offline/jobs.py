"""Jobs of real prompts with the lengths of their answers, for the simulator."""

from pathlib import Path

import numpy as np

from lab.data.rows import Source, read_rows
from simulator.workload.workload import Workload

FILES = ("sharegpt1k", "gsm8k", "task_bugfix", "zeroeval_math", "codealpaca2k")
MOST_TOKENS = 4_096  # of an answer
HARDWARE = "h100-llama3-8b"


def read_job(folder: Path, count: int, seed: int) -> Workload:
    """`count` prompts, about as many of each file of FILES, in random order, all sent at once.
    Raises ValueError if there are fewer."""
    rng = np.random.default_rng(seed)
    rows = [
        row
        for name in FILES
        for row in read_rows(Source(folder / f"{name}.jsonl.gz"), -(-count // len(FILES)), seed)
    ]
    if len(rows) < count:
        raise ValueError(f"{folder} has {len(rows):,} prompts, and {count:,} are needed")
    chosen = [rows[at] for at in rng.permutation(len(rows))[:count]]
    return Workload(
        "job",
        np.zeros(count),
        np.array([max(1, row.input_tokens) for row in chosen]),
        np.array([min(MOST_TOKENS, max(1, row.output_tokens)) for row in chosen]),
        prompts=[row.prompt for row in chosen],
    )
