"""The live page with several models: one at a time, chosen in the header."""

import pytest

from tests.chromium import Tab
from tests.gateway.faces.ui.chat_page import ANSWER, ask, wait_until_ended
from tests.gateway.model_fakes import run_models

pytestmark = pytest.mark.slow

LIST, NAME = "document.querySelector('#models')", "document.querySelector('#model')"


async def choose(tab: Tab, model: str) -> None:
    await tab.value(f"{LIST}.value = '{model}', {LIST}.dispatchEvent(new Event('change'))")
    await tab.until(f"{NAME}.textContent === '{model}'")


async def test_chat_and_board_are_of_the_chosen_model(tab: Tab) -> None:
    async with run_models({"small": "11", "large": "22"}) as models:
        await tab.open(f"{models.first.http_url}/ui/")
        await tab.until(f"!{LIST}.hidden")
        assert await tab.value(f"[...{LIST}.options].map((each) => each.value)") == [
            "small", "large",
        ]  # fmt: skip
        for model, text in (("small", "11"), ("large", "22"), ("small", "11")):
            await choose(tab, model)
            await ask(tab, "Hello.")
            await wait_until_ended(tab)
            assert await tab.text(ANSWER) == text
            await tab.value("location.hash = '#board'")
            await tab.until(
                f"document.querySelector('#workers .note')?.textContent.startsWith('{model} ')"
            )
            await tab.value("location.hash = '#chat'")


async def test_one_model_is_a_name_and_no_list(tab: Tab) -> None:
    async with run_models({"small": "11"}) as models:
        await tab.open(f"{models.first.http_url}/ui/")
        await tab.until(f"{NAME}.textContent === 'small'")
        assert await tab.value(f"[{LIST}.hidden, {NAME}.hidden]") == [True, False]
