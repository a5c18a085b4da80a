"""`python -m tests.faults`: a long run of requests and faults, and its report."""

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.faults.faults import TARGETS, choose_targets
from tests.faults.run import PAUSE_S, roll, run
from tests.faults.system import running_system
from tests.faults.traffic import undisturbed_answers
from tests.faults.validation import Report
from tests.live import NotStarted


async def _run(arguments: argparse.Namespace, options: list[str], folder: Path) -> Report:
    async with running_system(folder, *options) as system:
        expected = await undisturbed_answers(system.live.grpc)
        print(f"seed {arguments.seed}: {len(expected)} answers are known", flush=True)
        began_s = time.monotonic()
        if arguments.rolling:
            report = await roll(system, expected, arguments.seed)
        else:
            report = await run(
                system,
                expected,
                arguments.seed,
                arguments.requests,
                arguments.seconds,
                arguments.longest,
                arguments.pause,
                arguments.only or TARGETS,
            )
        print(f"{time.monotonic() - began_s:.0f} s")
        return report


def _write(file: Path, report: Report, seed: int, arguments: list[str]) -> None:
    """As JSON. The seed determines requests and faults, as far as the run got."""
    run = {"seed": seed, "arguments": arguments, "good": report.good}
    file.write_text(json.dumps(run | report.figures(), indent=2) + "\n")


def _positive(text: str) -> float:
    with suppress(ValueError):
        if (number := float(text)) > 0:
            return number
    raise argparse.ArgumentTypeError(f"write a number above 0 (got {text!r})")


def _targets(text: str) -> Mapping[str, Sequence[str]]:
    try:
        return choose_targets(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    """Returns 1 if an answer was lost or wrong, or a process wrote a traceback; 2 if the system did
    not start."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description="Inject faults into a system under load and check every answer. Other options "
        "are those of `foretoken serve`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--seed", type=int, default=1, help="of the requests and faults")
    add("--requests", type=int, default=10_000, help="answered, at most")
    add("--seconds", type=_positive, default=inf, help="during which faults begin, at most")
    add("--longest", type=_positive, default=40.0, help="seconds of one fault, at most")
    add("--pause", type=_positive, default=PAUSE_S, help="seconds between two faults, on average")
    add("--only", type=_targets, metavar="FAULTS", help="some faults: kill:worker,stop:gateway")
    add("--rolling", action="store_true", help="only end each process once, one after another")
    add("--report", type=Path, metavar="FILE", help="write the report to FILE, as JSON")
    arguments, options = parser.parse_known_args()
    if arguments.report:
        try:
            arguments.report.open("a").close()
        except OSError as error:
            parser.error(f"--report: {error}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with TemporaryDirectory() as folder:
        try:
            report = asyncio.run(_run(arguments, options, Path(folder)))
        except NotStarted as error:
            print(error, file=sys.stderr)
            return 2
        errors = (Path(folder) / "stderr").read_text()
    print(report)
    if arguments.report:
        file = str(arguments.report)
        given = [each for each in sys.argv[1:] if each != "--report" and not each.endswith(file)]
        _write(arguments.report, report, arguments.seed, given)
    if "Traceback" in errors:
        print(errors, file=sys.stderr)
        return 1
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
