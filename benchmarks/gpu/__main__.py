"""Every Triton kernel on a CUDA device: checked against float64, then timed against its ceiling.

`python -m benchmarks.gpu [--json FILE] [--quick]`. `--interpret` makes the checks alone, on the CPU
in Triton's interpreter.
"""

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

NO_DEVICE = (
    "no CUDA device is at hand, and these figures are a device's: run this on a machine with an "
    "NVIDIA GPU (the kernels' checks alone run anywhere: --interpret)"
)


@dataclass(frozen=True)
class Options:
    """As given on the command line."""

    json: Path | None
    quick: bool
    interpret: bool


def parse() -> Options:
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels on a GPU.")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--interpret", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    return Options(given.json, given.quick, given.interpret)


def main() -> int:
    options = parse()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    # Imported now: Triton reads its environment when it is first imported.
    import torch

    from benchmarks.gpu.report import measure, run_checks

    if options.interpret:
        return run_checks(torch.device("cpu"), options.quick)
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 1
    failed = run_checks(torch.device("cuda"), options.quick)
    return measure(options.quick, options.json, failed)


if __name__ == "__main__":
    sys.exit(main())
