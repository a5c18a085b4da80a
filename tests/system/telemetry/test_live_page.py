"""The live page on a real system: its data, and how it renders in headless Chromium."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.chromium import Tab, browsing
from tests.live import MODES, serving, wait_for

KV_TOKENS = 2048
SCREENS = [(360, 740, "light"), (360, 740, "dark"), (1280, 800, "dark")]
# Sends temperature 0, so that the demo model's answers are known.
GREEDY = """{
  const unchanged = window.fetch;
  const greedy = (body) => JSON.stringify({ ...JSON.parse(body), temperature: 0 });
  window.fetch = (path, { body, ...rest } = {}) =>
    unchanged(path, body ? { ...rest, body: greedy(body) } : rest);
}"""
REQUESTS = "Number(document.querySelector('#sla-rows tr:last-child .number').innerText)"


def reported(http: str, path: str) -> Any:
    return json.load(urlopen(f"{http}/ui/{path}", timeout=30))


def chat(http: str, words: int) -> str:
    body = {"messages": [{"role": "user", "content": f"Write star {words} times."}]}
    headers = {"content-type": "application/json", "x-foretoken-sla": "batch"}
    request = Request(f"{http}/v1/chat/completions", json.dumps(body).encode(), headers)
    answer: dict[str, str] = json.load(urlopen(request, timeout=120))
    return answer["id"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["embedded", "separate"])
def test_board_and_why_of_a_live_system(mode: str) -> None:
    arguments = ["--kv-tokens", str(KV_TOKENS), "--workers", "2", "--policy", "past-future"]
    with serving(*arguments, *MODES[mode]) as live:
        before = reported(live.http, "board")
        assert before["ready"] and before["preset"] == "past-future"
        assert (before["running"], before["queued"], before["classes"]) == (0, 0, {})
        workers = before["workers"]
        assert [worker["id"] for worker in workers] == ["worker-0", "worker-1"]
        assert {worker["kv_tokens"] for worker in workers} == {KV_TOKENS}
        assert all(worker["block_tokens"] > 0 for worker in workers)
        answer_id = chat(live.http, words=20)
        wait_for(lambda: reported(live.http, "board")["classes"] != {})
        kept = reported(live.http, "board")["classes"]["batch"]
        assert (kept["met"], kept["missed"]) == (1, {})
        assert kept["tokens"] == kept["good_tokens"] > 20
        (story,) = reported(live.http, f"why/{answer_id}")["stories"]
        assert story["request_id"] == answer_id.removeprefix("chatcmpl-") + "-0"
        # A time in the gateway that is too short to print has no chapter.
        kinds = [each["kind"] for each in story["chapters"] if each["kind"] != "received"]
        assert kinds[0] == "arrived" and "judged" in kinds
        assert reported(live.http, "about")["model"] == "demo"


@pytest.mark.slow
def test_no_ui_flag_disables_the_page() -> None:
    with serving("--no-ui") as live:
        for path in ("/ui/", "/ui/board"):
            request = Request(live.http + path, headers={"accept": "text/html"})
            with pytest.raises(OSError, match="404"):
                urlopen(request, timeout=30)
        root = Request(live.http, headers={"accept": "text/html"})
        assert urlopen(root, timeout=30).url == f"{live.http}/docs"
        assert urlopen(f"{live.http}/health", timeout=30).status == 200


async def ask(tab: Tab, text: str) -> None:
    await tab.value("document.querySelector('#message').focus()")
    await tab.type(text)
    await tab.press("Enter")


async def show(tab: Tab, view: str) -> None:
    await tab.value(f"void (location.hash = '#{view}')")
    await tab.until(f"!document.querySelector('#view-{view.split('/')[0]}').hidden")


@asynccontextmanager
async def loaded(http: str) -> AsyncIterator[None]:
    """Six connections send one request after another while the block runs."""

    async def send_in_turn() -> None:
        while True:
            await asyncio.to_thread(chat, http, 40)

    tasks = [asyncio.ensure_future(send_in_turn()) for _ in range(6)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
async def test_live_page_works_in_a_browser(chromium_program: str) -> None:
    with serving("--kv-tokens", str(KV_TOKENS), "--workers", "2") as live:
        async with browsing(chromium_program) as browser, browser.tab() as tab:
            await tab.look(1280, 800)
            await tab.call("Page.addScriptToEvaluateOnNewDocument", source=GREEDY)
            await tab.open(f"{live.http}/")
            assert await tab.value("location.pathname") == "/ui/"
            await tab.until("document.querySelector('#sla').value === 'standard'")
            await tab.until("document.querySelector('#preset').innerText === 'preset foretoken'")
            await tab.shot("welcome")
            await ask(tab, "Count from 3 to 140.")
            await tab.until("Number(document.querySelector('#number-sent').innerText) > 60")
            await tab.shot("chat")
            await tab.until("!document.querySelector('#send').hidden")
            answer = (await tab.text(".assistant .content")).split()
            assert answer == [str(number) for number in range(3, 141)]
            assert "Ended after" in await tab.text("#forecast")
            await tab.shot("chat-ended")
            await check_story(tab)
            await check_board(tab, live.http)
            for width, height, scheme in SCREENS:
                await check_screen(tab, width, height, scheme)
            assert tab.complaints == []
            assert [url for url in tab.asked if not url.startswith(live.http)] == []


async def check_story(tab: Tab) -> None:
    await tab.click("#ending a")
    await tab.until("document.querySelectorAll('.story li').length > 3")
    assert (await tab.text(".story")).count("as its client saw it") == 1
    await tab.shot("why")


async def check_board(tab: Tab, http: str) -> None:
    await show(tab, "board")
    await tab.until("document.querySelector('#card-running').innerText === '0'")
    async with loaded(http):
        await tab.until("Number(document.querySelector('#card-running').innerText) > 2")
        await tab.until(
            "[...document.querySelectorAll('#workers .meter')].some((bar) => bar.ariaValueNow > 0)"
        )
        await tab.until(f"{REQUESTS} > 8")
        assert "worker-1" in await tab.text("#workers")
        await tab.shot("board")
    assert "foretoken: " in await tab.text("#preset-current")


async def check_screen(tab: Tab, width: int, height: int, scheme: str) -> None:
    await tab.look(width, height, scheme)
    for view in ("chat", "board", "why"):
        await show(tab, view)
        if view == "chat":
            await tab.click("#new-chat")
            await ask(tab, "Count from 1 to 100.")
            await tab.until("Number(document.querySelector('#number-sent').innerText) > 40")
        assert await tab.value("document.documentElement.scrollWidth") == width
        await tab.shot(f"{view}-{width}-{scheme}")
        await tab.until("!document.querySelector('#send').hidden")
