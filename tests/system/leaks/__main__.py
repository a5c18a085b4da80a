"""Every ending of a request, many times: `python -m tests.system.leaks 20000`.

Prints the resident memory of each process after every thousand requests and its slope, and the
counts that differ from those after the first thousand. Ends with an error if one does.
"""

import argparse
import asyncio

from foretoken.running.embedded import embedded
from services.runtime.server import Lifecycle
from tests.system.leaks.endings import send_endings
from tests.system.leaks.load import AT_A_TIME, OPTIONS, address_of, count_idle, settled_differences
from tests.system.leaks.resources import measure_memory

PART = 1_000


async def run(count: int) -> None:
    async with embedded(OPTIONS, Lifecycle()) as system:
        host, port = address_of(system)
        memory: list[dict[str, int]] = []
        before: dict[str, float] = {}
        for number in range(count // PART):
            wrong = await send_endings(host, port, PART, AT_A_TIME)
            assert not wrong, wrong[:10]
            if not before:
                before = await count_idle(system)
            memory.append(measure_memory())
            print((number + 1) * PART, memory[-1], flush=True)
        different = await settled_differences(system, before)
    half = memory[len(memory) // 2 :]  # caches and windows are full by then
    for name in half[0]:
        slope_kib = (half[-1][name] - half[0][name]) / max(1, len(half) - 1)
        print(f"{name or 'gateway and scheduler'}: {slope_kib:+.0f} KiB per {PART} requests")
    assert not different, different


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=20_000)
    asyncio.run(run(parser.parse_args().count))
