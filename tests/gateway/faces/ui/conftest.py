"""A tab of headless Chromium."""

from collections.abc import AsyncIterator

import pytest

from tests.chromium import Tab, browsing


@pytest.fixture
async def tab(chromium_program: str) -> AsyncIterator[Tab]:
    async with browsing(chromium_program) as browser, browser.tab() as new_tab:
        await new_tab.look(1280, 800)
        yield new_tab
        assert new_tab.complaints == []
