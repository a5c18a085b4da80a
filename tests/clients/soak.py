"""Soak of foretoken.vllm: `python -m tests.clients.soak --requests 20000 --seconds 900`.

vLLM's own scheduler answers each of some hundred requests once, and foretoken's answers them again
and again, as scripts/vllm_inside.py describes: in memory that is short, with cancels, patterns,
schemas, seeds, several answers and prefix caching. Prints what happened, and the requests with
other answers. Status 1 if there are any, or if requests failed.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foretoken.running.options import demo_model
from tests.clients.conftest import QUIET, SCRIPTS
from tests.clients.environments import VLLM_VERSIONS, python_of
from tests.clients.test_inside_vllm import REQUESTS, VLLM, prompts

IN_FLIGHT, BLOCKS, MAX_TOKENS = 100, 36, 20
OWN_S = 600


def run(options: argparse.Namespace, file: Path, scheduler: str, count: int, s: int) -> Any:
    """What the script prints."""
    numbers = (count, IN_FLIGHT, BLOCKS, MAX_TOKENS, s)
    done = subprocess.run(
        [
            *(str(python_of(f"vllm-{options.vllm}")), str(SCRIPTS / "vllm_inside.py")),
            *(str(demo_model()), str(file), scheduler, options.mode, *map(str, numbers)),
        ],
        env={**os.environ, **QUIET, **VLLM},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith('{"answers"')))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=int, default=900, help="none is sent after this time")
    parser.add_argument("--mode", choices=("sync", "async"), default="sync")
    parser.add_argument("--vllm", choices=VLLM_VERSIONS, default=VLLM_VERSIONS[-1])
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.jsonl"
        file.write_text(prompts())
        own = run(options, file, "own", REQUESTS, OWN_S)
        scheduler = "foretoken.vllm.Scheduler"
        ours = run(options, file, scheduler, options.requests, options.seconds)
    expected = [own["answers"][number % REQUESTS] for number in range(options.requests)]
    both = list(zip(ours["answers"], expected, strict=True))
    different = [n for n, (a, b) in enumerate(both) if a != b and None not in (a, b)]
    for key in ("sent", "failed", "alive", "preemptions", "kv_in_use"):
        print(f"{key}: {ours[key]}")
    print(f"compared: {sum(None not in pair for pair in both)}\ndifferent: {different}")
    return int(bool(different or ours["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
