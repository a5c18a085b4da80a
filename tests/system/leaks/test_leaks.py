"""Requests of every ending leave nothing behind. A longer run is `python -m tests.system.leaks`."""

import pytest

from foretoken.running.embedded import embedded
from services.runtime.server import Lifecycle
from tests.system.leaks.endings import ENDINGS, send_endings
from tests.system.leaks.load import AT_A_TIME, OPTIONS, address_of, count_idle, settled_differences

FIRST, MORE = len(ENDINGS), 3 * len(ENDINGS)  # the first requests open connections and files


@pytest.mark.slow
async def test_requests_of_every_ending_leave_nothing_behind() -> None:
    async with embedded(OPTIONS, Lifecycle()) as system:
        address = address_of(system)
        assert await send_endings(*address, FIRST, AT_A_TIME) == []
        before = await count_idle(system)
        assert await send_endings(*address, MORE, AT_A_TIME) == []
        assert await settled_differences(system, before) == {}
    kinds = {name.partition(" ")[0].partition("{")[0] for name, count in before.items() if count}
    assert kinds >= {"tasks", "descriptors", "kv_blocks"}, "nothing was counted"
