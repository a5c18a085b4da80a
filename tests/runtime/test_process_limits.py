"""The limit of open files of a process and its children."""

import resource
import subprocess
import sys

from services.runtime.process_limits import MAX_OPEN_FILES

HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
SCRIPT = """
import resource, subprocess, sys
from services.runtime.process_limits import raise_open_file_limit, open_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_open_file_limit()
child = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
print(open_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[1], flush=True)
subprocess.run([sys.executable, "-c", child], check=True)
"""


def limits(soft: int, hard: int) -> list[int]:
    """The soft limit, the hard limit, and the soft limit of a child process."""
    code = SCRIPT.format(soft=soft, hard=hard)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return [int(word) for word in process.stdout.split()]


def test_open_files_are_raised_to_the_hard_limit() -> None:
    wanted = MAX_OPEN_FILES if HARD == resource.RLIM_INFINITY else min(HARD, MAX_OPEN_FILES)
    assert limits(256, HARD) == [wanted, HARD, wanted]


def test_open_file_limit_is_bounded_and_never_lowered() -> None:
    assert limits(256, 512) == [512, 512, 512]
    assert limits(512, 512) == [512, 512, 512]
