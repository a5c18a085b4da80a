"""`python -m tests.foretoken.crashing_child --set SECTION.does=…`: a child with scripted behaviour.

stays             runs until SIGTERM
ignores-sigterm   runs until SIGKILL
exits             exits at once with status 3 and no message
rejects-settings  exits at once with status 2 and a message
stays-once FILE   `stays` the first time, later `rejects-settings`
exits-thrice FILE `exits` three times, later `stays`
"""

import signal
import sys
import time
from pathlib import Path

from services.runtime.startup import STAGE_MARK, UP


def main() -> None:
    section, _, does = sys.argv[2].partition(".does=")
    does, _, file = does.partition(" ")
    print(f"{STAGE_MARK}loading", file=sys.stderr, flush=True)
    if does == "stays-once":
        does = "rejects-settings" if Path(file).exists() else "stays"
        Path(file).touch()
    if does == "exits-thrice":
        with Path(file).open("a") as starts:
            does = "exits" if starts.tell() < 3 else "stays"
            starts.write(".")
    if does == "rejects-settings":
        print(f"foretoken {section}: the settings are invalid", file=sys.stderr)
        sys.exit(2)
    if does == "exits":
        sys.exit(3)
    if does == "ignores-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(f"{STAGE_MARK}{UP}\nsomething else", file=sys.stderr, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
