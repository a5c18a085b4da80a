"""Jobs of real prompts with the lengths of their answers, for the simulator."""

from pathlib import Path

import numpy as np

from lab.data.rows import Source, read_rows
from simulator.workload.workload import Workload

FILES = ("sharegpt1k", "gsm8k", "task_bugfix", "zeroeval_math", "codealpaca2k")
MOST_TOKENS = 4_096  # of an answer
HARDWARE = "h100-llama3-8b"


def read_job(folder: Path, count: int, seed: int) -> Workload:
    """`count` prompts, as many of each file of FILES, in random order, all sent at once."""
    rng = np.random.default_rng(seed)
    rows = [
        row
        for name in FILES
        for row in read_rows(Source(folder / f"{name}.jsonl.gz"), -(-count // len(FILES)), seed)
    ]
    chosen = [rows[at] for at in rng.permutation(len(rows))[:count]]
    return Workload(
        "job",
        np.zeros(count),
        np.array([max(1, row.input_tokens) for row in chosen]),
        np.array([min(MOST_TOKENS, max(1, row.output_tokens)) for row in chosen]),
        prompts=[row.prompt for row in chosen],
    )
