"""How many files a process may have open: each connection is one."""

import resource

ENOUGH = 65_536  # where the system's own bound is a billion, some programs look at each


def allow_open_files() -> None:
    """As many as the system lets us, up to ENOUGH, for this process and those it starts: the usual
    1,024 are fewer than the requests that wait under overload."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if most == resource.RLIM_INFINITY else min(most, ENOUGH)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def open_files_allowed() -> int:
    """At once, by this process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if allowed == resource.RLIM_INFINITY else allowed
