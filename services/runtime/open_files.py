"""The limit of open files; each connection needs one."""

import resource

ENOUGH = 65_536  # a bound, because some programs iterate over all descriptors up to the limit


def allow_open_files() -> None:
    """Raises the soft limit to the hard one, up to ENOUGH, for this process and its children: the
    usual 1,024 are fewer than the requests that wait under overload."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if most == resource.RLIM_INFINITY else min(most, ENOUGH)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def open_files_allowed() -> int:
    """The current soft limit of this process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if allowed == resource.RLIM_INFINITY else allowed
