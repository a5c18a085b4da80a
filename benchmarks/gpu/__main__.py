"""Checks every Triton kernel against float64 on a CUDA device, and times it against its ceiling.

    python -m benchmarks.gpu [--json FILE] [--quick] [--interpret]

`--interpret` runs only the checks, on the CPU in Triton's interpreter.
"""

import os
import sys

from benchmarks.harness.report import parser

NO_DEVICE = (
    "no CUDA device is available: run this on a machine with an NVIDIA GPU, or run only the checks "
    "with --interpret"
)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--interpret", action="store_true", help="run the checks on the CPU")
    args = options.parse_args()
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    # Triton reads its environment when it is first imported.
    import torch

    from benchmarks.gpu.report import measure, run_checks

    if args.interpret:
        return run_checks(torch.device("cpu"), args.quick)
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 1
    failed = run_checks(torch.device("cuda"), args.quick)
    return measure(args.quick, args.json, failed)


if __name__ == "__main__":
    sys.exit(main())
