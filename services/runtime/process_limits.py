"""What this process may use: cores, and open files, of which each connection needs one."""

import os
import resource

MAX_OPEN_FILES = 65_536  # not more: some programs iterate over all descriptors up to the limit


def raise_open_file_limit() -> None:
    """Raises the soft limit of this process and its children to the hard limit, up to
    MAX_OPEN_FILES. The usual limit of 1,024 is below the number of requests that wait under
    overload."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(most, MAX_OPEN_FILES)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def open_file_limit() -> int:
    """The soft limit of this process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if allowed == resource.RLIM_INFINITY else allowed


def cores() -> int:
    """Cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
