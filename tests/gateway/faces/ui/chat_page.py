"""Steps of a user on the chat page."""

from tests.chromium import Tab
from tests.gateway.faces.ui.forecast_server import ForecastServer

ANSWER = ".assistant:last-of-type .content"


async def open_chat(tab: Tab, server: ForecastServer) -> None:
    await tab.open(f"{server.url}/ui/")
    await tab.until("document.querySelector('#sla').value !== ''")


async def ask(tab: Tab, text: str = "Say forty words.") -> None:
    await tab.value("document.querySelector('#message').focus()")
    await tab.type(text)
    await tab.press("Enter")


async def wait_until_ended(tab: Tab) -> None:
    await tab.until("!document.querySelector('#send').hidden")
