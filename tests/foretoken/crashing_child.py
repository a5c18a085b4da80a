"""`python -m tests.foretoken.crashing_child --set SECTION.does=…`: a child with scripted behaviour.

stays            until SIGTERM
deaf             stays, and hears no SIGTERM
dies             at once, with status 3 and no word
refuses          at once, with a sentence and status 2
stays-once FILE  as `stays` the first time, later as `refuses`
"""

import signal
import sys
import time
from pathlib import Path

from services.runtime.startup import STAGE_MARK, UP


def main() -> None:
    section, _, does = sys.argv[2].partition(".does=")
    does, _, file = does.partition(" ")
    print(f"{STAGE_MARK}thinking", file=sys.stderr, flush=True)
    if does == "stays-once":
        does = "refuses" if Path(file).exists() else "stays"
        Path(file).touch()
    if does == "refuses":
        print(f"foretoken {section}: it will not", file=sys.stderr)
        sys.exit(2)
    if does == "dies":
        sys.exit(3)
    if does == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"{STAGE_MARK}{UP}\nsomething else", file=sys.stderr, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
