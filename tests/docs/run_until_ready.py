"""Run `foretoken …` or `make …`; a command that serves ends once its server is ready.

`python run_until_ready.py foretoken serve --policy fcfs` starts the server on free ports, waits
for the ready line, interrupts it as Ctrl-C does, and exits with its status. Other commands run
unchanged.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0")
READY = "foretoken is ready:"
MAKE_INTERRUPTED = (2, 130, -signal.SIGINT)  # make's own status after Ctrl-C


def main() -> int:
    program, *arguments = sys.argv[1:]
    if program == "make":
        command = ["make", "-C", str(ROOT), *arguments]
        command += [f"ARGS={' '.join(FREE_PORTS)}"] if "serve" in arguments else []
    else:
        command = [sys.executable, "-m", "foretoken", *arguments]
        command += FREE_PORTS if _serves(arguments) else ()
    if not _serves(arguments):
        return subprocess.run(command).returncode
    return _serve(command)


def _serves(arguments: list[str]) -> bool:
    return "serve" in arguments[:1] and "--help" not in arguments


def _serve(command: list[str]) -> int:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="")
        if READY in line:
            os.killpg(process.pid, signal.SIGINT)
            status = process.wait(60)
            interrupted_make = command[0] == "make" and status in MAKE_INTERRUPTED
            return 0 if interrupted_make else status
    return process.wait(60) or 1


if __name__ == "__main__":
    sys.exit(main())
