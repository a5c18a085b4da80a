"""Traces: CSV files of requests, plain or gzip."""

from pathlib import Path

import numpy as np

from services.forecast import Ints
from simulator.csv_table import read_csv
from simulator.workload.workload import Workload

ARRIVAL, INPUT, OUTPUT = "arrival_s", "input_tokens", "output_tokens"
KIND, PROMPT = "kind", "prompt"


def read_trace(path: Path, most: int = 0) -> Workload:
    """The requests of a trace, sorted by arrival and shifted so that the first arrives at 0.

    Columns: `arrival_s,input_tokens,output_tokens[,kind][,prompt]`; others are ignored. Only the
    first `most` rows are read, 0 for all. Raises ValueError that names the file, the line and the
    column of a bad value.
    """
    table = read_csv(path, (ARRIVAL, INPUT, OUTPUT), optional=(KIND, PROMPT), most=most)
    arrival_s = table.numbers(ARRIVAL)
    order = np.argsort(arrival_s, kind="stable")
    arrival_s = arrival_s[order]
    kinds, prompts = table.columns.get(KIND, ()), table.columns.get(PROMPT, ())
    return Workload(
        path.name.removesuffix(".gz").removesuffix(".csv"),
        arrival_s - arrival_s[0],
        table.lengths(INPUT)[order],
        table.lengths(OUTPUT)[order],
        [kinds[row] for row in order] if kinds else (),
        [prompts[row] for row in order] if prompts else (),
    )


def read_lengths(path: Path) -> tuple[Ints, Ints]:
    """Input and output tokens of a file with these columns, row by row. Raises ValueError as
    `read_trace` does."""
    table = read_csv(path, (INPUT, OUTPUT))
    return table.lengths(INPUT), table.lengths(OUTPUT)
