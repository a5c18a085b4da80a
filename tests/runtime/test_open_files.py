"""A process that serves many connections at once asks the system for as many files."""

import resource
import subprocess
import sys

from services.runtime.open_files import ENOUGH

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
SAYS = """
import resource, subprocess, sys
from services.runtime.open_files import allow_open_files, open_files_allowed
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_open_files()
child = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
print(open_files_allowed(), resource.getrlimit(resource.RLIMIT_NOFILE)[1], flush=True)
subprocess.run([sys.executable, "-c", child], check=True)
"""


def after(soft: int, hard: int) -> list[int]:
    """Allowed here, at most here, and allowed to a process started from there."""
    code = SAYS.format(soft=soft, hard=hard)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return [int(word) for word in process.stdout.split()]


def test_open_files_are_raised_to_the_hard_limit() -> None:
    wanted = ENOUGH if HARD == resource.RLIM_INFINITY else min(HARD, ENOUGH)
    assert after(256, HARD) == [wanted, HARD, wanted]


def test_open_file_limit_is_bounded_and_never_lowered() -> None:
    assert after(256, 512) == [512, 512, 512]
    assert after(512, 512) == [512, 512, 512]
