"""Traces: CSV files of requests, plain or gzip."""

from pathlib import Path

import numpy as np

from services.forecast import Ints
from services.runtime.csv_table import CsvTable, read_csv
from simulator.workload.workload import Workload

ARRIVAL, INPUT, OUTPUT = "arrival_s", "input_tokens", "output_tokens"
KIND, PROMPT, HASH_IDS = "kind", "prompt", "hash_ids"


def read_trace(path: Path, most: int = 0) -> Workload:
    """Reads the requests of a trace, sorts them by arrival and shifts the first arrival to 0.

    Columns: `arrival_s,input_tokens,output_tokens[,kind][,prompt][,hash_ids]`; others are ignored.
    `hash_ids` are numbers of the prompt's blocks, separated by spaces. Only the first `most` rows
    are read, 0 for all. Raises ValueError that names the file, the line and the column of a bad
    value.
    """
    table = read_csv(path, (ARRIVAL, INPUT, OUTPUT), optional=(KIND, PROMPT, HASH_IDS), most=most)
    arrival_s = table.numbers(ARRIVAL)
    order = np.argsort(arrival_s, kind="stable")
    with np.errstate(over="ignore"):  # an infinite span is refused like any other long one
        arrival_s = arrival_s[order] - arrival_s.min()
    kinds, prompts = table.columns.get(KIND, ()), table.columns.get(PROMPT, ())
    hash_ids = _hash_ids(table)
    return Workload(
        path.name.removesuffix(".gz").removesuffix(".csv"),
        arrival_s,
        table.lengths(INPUT)[order],
        table.lengths(OUTPUT)[order],
        [kinds[row] for row in order] if kinds else (),
        [prompts[row] for row in order] if prompts else (),
        [hash_ids[row] for row in order] if hash_ids else (),
    )


def _hash_ids(table: CsvTable) -> list[list[int]]:
    """Returns the ids of each row, renumbered from 0 on: a trace may have 64-bit hashes."""
    numbers: dict[str, int] = {}
    return [
        [numbers.setdefault(name, len(numbers)) for name in cell.split()]
        for cell in table.columns.get(HASH_IDS, ())
    ]


def read_lengths(path: Path) -> tuple[Ints, Ints]:
    """Reads the columns of input and output tokens of a file. Raises ValueError as `read_trace`
    does."""
    table = read_csv(path, (INPUT, OUTPUT))
    return table.lengths(INPUT), table.lengths(OUTPUT)
