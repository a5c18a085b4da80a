"""Lengths of the papers' datasets: rows of a file that the user has, else drawn from quantiles."""

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.forecast import Floats, Ints
from simulator.papers.document import read_document
from simulator.workload.trace import read_lengths

FILE, QUANTILES = "file", "quantiles"  # where lengths come from
Generator = np.random.Generator


@dataclass(frozen=True, slots=True)
class Lengths:
    """Input and output tokens of requests; `origin` is FILE or QUANTILES."""

    input_tokens: Ints
    output_tokens: Ints
    origin: str


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset's file in a folder of lengths, and quantiles of its lengths at `levels`."""

    file: str
    source: str
    levels: Floats
    input_tokens: Floats
    output_tokens: Floats

    def draw(self, count: int, longest: int, folder: Path | None, rng: Generator) -> Lengths:
        """Draws `count` requests of at most `longest` tokens, with replacement. Longer rows of a
        file are left out; longer drawn answers are cut. Raises ValueError for a file that is
        missing, cannot be read, or has no such row."""
        if folder is None:
            inputs = np.minimum(self._draw(self.input_tokens, count, rng), longest - 1)
            outputs = np.minimum(self._draw(self.output_tokens, count, rng), longest - inputs)
            return Lengths(inputs, outputs, QUANTILES)
        inputs, outputs = _read_file(folder / self.file)
        fitting = np.flatnonzero((inputs + outputs <= longest) & (inputs > 0) & (outputs > 0))
        if not len(fitting):
            raise ValueError(f"{folder / self.file} has no row with at most {longest} tokens")
        rows = rng.choice(fitting, count)
        return Lengths(inputs[rows], outputs[rows], FILE)

    def _draw(self, quantiles: Floats, count: int, rng: Generator) -> Ints:
        logarithms = np.interp(rng.random(count), self.levels, np.log(quantiles))
        tokens: Ints = np.maximum(1, np.rint(np.exp(logarithms))).astype(np.int64)
        return tokens


def read_datasets() -> dict[str, Dataset]:
    """Returns the datasets of datasets.toml by name."""
    document = read_document(__package__, "datasets.toml")
    levels = np.array(document.pop("levels"))
    return {
        name: Dataset(
            table["file"],
            table["source"],
            levels,
            np.array(table["input_tokens"], float),
            np.array(table["output_tokens"], float),
        )
        for name, table in document.items()
    }


def _read_file(path: Path) -> tuple[Ints, Ints]:
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; without a folder of lengths, they are drawn from quantiles"
        )
    return _read_json_lines(path) if ".jsonl" in path.suffixes else read_lengths(path)


def _read_json_lines(path: Path) -> tuple[Ints, Ints]:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            rows = [
                (int(row["input_tokens"]), int(row["output_tokens"]))
                for row in map(json.loads, filter(str.strip, file))
            ]
        tokens = np.array(rows, np.int64).reshape(-1, 2)
    except (
        OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, OverflowError,
    ) as error:  # fmt: skip
        raise ValueError(
            f"cannot read {path}: each line must be JSON with input_tokens and output_tokens "
            f"({error})"
        ) from None
    return tokens[:, 0], tokens[:, 1]
