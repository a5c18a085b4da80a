"""The chat in headless Chromium, against a server that foresees as the contract says."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chromium import Tab, browsing
from tests.gateway.faces.ui.foreseeing import WORDS, Foreseeing, foreseeing, foreseen

pytestmark = pytest.mark.slow

SCREENS = [(1280, 800, "light"), (1280, 800, "dark"), (360, 740, "light"), (360, 740, "dark")]
SAID = ".assistant:last-of-type .said"
PROBES = Path(__file__).with_name("probes.js")


@pytest.fixture
async def tab(chromium_program: str) -> AsyncIterator[Tab]:
    async with browsing(chromium_program) as browser, browser.tab() as made:
        await made.look(1280, 800)
        yield made
        assert made.complaints == []


async def opened(tab: Tab, server: Foreseeing) -> None:
    await tab.open(f"{server.url}/ui/")
    await tab.until("document.querySelector('#sla').value !== ''")


async def ask(tab: Tab, text: str = "Say forty words.") -> None:
    await tab.value("document.querySelector('#message').focus()")
    await tab.type(text)
    await tab.press("Enter")


async def ended(tab: Tab) -> None:
    await tab.until("!document.querySelector('#send').hidden")


def percent(tokens: float, scale: float) -> float:
    return round(100 * tokens / scale, 1)


async def bar(tab: Tab) -> dict[str, float]:
    """Where its parts stand, in percent of its width."""
    told = await tab.value(
        """(() => {
          const bar = document.querySelector("#bar").getBoundingClientRect();
          const part = (name) => document.querySelector(`#bar .${name}`).getBoundingClientRect();
          const at = (x) => Math.round((x - bar.left) / bar.width * 1000) / 10;
          return {sent: at(part("sent").right), low: at(part("band").left),
                  high: at(part("band").right), expected: at(part("tick").left + 2)};
        })()"""
    )
    return dict(told)


async def test_the_interval_narrows_token_by_token(tab: Tab) -> None:
    async with foreseeing(allowed=0) as server:
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        await tab.call("Emulation.setEmulatedMedia", features=[still])
        await opened(tab, server)
        await ask(tab)
        await tab.until("document.querySelector('#number-band').innerText === '12–96'")
        assert "first token promised after 0.41 s, expected to hold" in await tab.text("#promise")
        widths = []
        # The bar ends a little behind the first interval, and from 35 tokens on behind that of
        # then, since it would fill less than half.
        for sent, longest in ((1, 96), (10, 96), (25, 96), (34, 96), (39, 47)):
            scale = longest * 1.04
            await server.allow(sent)
            await tab.until(f"document.querySelector('#number-sent').innerText === '{sent}'")
            seen, told = await bar(tab), foreseen(sent)
            for name, tokens in (
                ("sent", sent), ("low", told["low_tokens"]), ("high", told["high_tokens"]),
                ("expected", told["expected_tokens"]),
            ):  # fmt: skip
                assert seen[name] == pytest.approx(percent(tokens, scale), abs=0.8), (sent, name)
            widths.append(seen["high"] - seen["low"])
            assert await tab.text(SAID) == "".join(WORDS[:sent]).strip()
        assert widths == sorted(widths, reverse=True) and widths[-1] < widths[0] / 4
        points = await tab.value("document.querySelector('#cone polyline').points.numberOfItems")
        assert points == 40  # before the first token, and after each since
        await server.allow(40)
        await ended(tab)
        assert (await bar(tab))["sent"] == 100
        assert await tab.text("#foreseen") == "Ended after 40 tokens"
        assert "First forecast: 48, 90 % within 12–96; it came to lie within." in await tab.text(
            "#ending"
        )
        assert server.bodies[0]["stream_options"] == {
            "include_usage": True, "include_forecast": True,
        }  # fmt: skip
        assert server.classes == ["interactive"]
        asked = [url for url in tab.asked if not url.startswith(server.url)]
        assert asked == []


async def test_clocks_against_the_budgets_of_the_class_that_is_chosen(tab: Tab) -> None:
    async with foreseeing() as server:
        await opened(tab, server)
        clocks = "[...document.querySelectorAll('#clocks > div')]"
        assert "of 60 s" in await tab.text("#clocks")
        await ask(tab)
        await ended(tab)
        assert not await tab.value(f"{clocks}.some((row) => row.classList.contains('missed'))")
        await tab.value(
            "(() => {const s = document.querySelector('#sla'); s.value = 'hasty';"
            "s.dispatchEvent(new Event('change'))})()"
        )
        await ask(tab)
        await ended(tab)
        assert server.classes == ["interactive", "hasty"]
        assert await tab.value(f"{clocks}.every((row) => row.classList.contains('missed'))")
        assert (await tab.text("#clocks")).count(", over") == 3
        roles = [turn["role"] for turn in server.bodies[1]["messages"]]
        assert roles == ["user", "assistant", "user"]


async def test_escape_stops_and_the_server_hears_of_it(tab: Tab) -> None:
    async with foreseeing(allowed=7) as server:
        await opened(tab, server)
        await ask(tab)
        await tab.until("document.querySelector('#number-sent').innerText === '7'")
        await tab.press("Escape")
        await ended(tab)
        assert await tab.text("#foreseen") == "Stopped after 7 tokens"
        assert await tab.text(SAID) == "".join(WORDS[:7]).strip()
        assert await tab.value("document.querySelector('#chat-error').hidden")
        async with asyncio.timeout(30):
            while not server.hung_up:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0.02)


async def test_a_server_that_knows_no_forecasts_is_asked_without(tab: Tab) -> None:
    async with foreseeing(knows_forecasts=False) as server:
        await opened(tab, server)
        for _ in range(2):
            await ask(tab)
            await ended(tab)
        wishes = [body["stream_options"].get("include_forecast") for body in server.bodies]
        assert wishes == [True, None, None]
        assert await tab.text("#foreseen") == "Ended after 40 tokens"
        assert "tells its clients no forecasts" in await tab.text("#ending")
    expected = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
    assert [each for each in tab.complaints if not each.startswith(expected)] == []
    tab.complaints.clear()


async def test_a_refusal_is_a_sentence(tab: Tab) -> None:
    refusal = (429, "1000 requests wait", {"retry-after": "3"})
    async with foreseeing(refusal=refusal) as server:
        await opened(tab, server)
        await ask(tab)
        await ended(tab)
        assert await tab.text("#chat-error") == "1000 requests wait. Try again in 3 s."
        assert await tab.value("document.querySelector('#chat-error').role") == "alert"
        server.refusal = None
        await ask(tab, "Again.")
        await ended(tab)
        assert await tab.value("document.querySelector('#chat-error').hidden")
        assert [turn["content"] for turn in server.bodies[1]["messages"]] == ["Again."]
    tab.complaints.clear()  # the browser itself remarks on a 429


async def test_a_server_that_wants_a_key_is_given_one(tab: Tab) -> None:
    async with foreseeing(key="s3cret") as server:
        await tab.open(f"{server.url}/ui/")
        await tab.until("document.querySelector('#key-dialog').open")
        await tab.type("s3cret")
        await tab.press("Enter")
        await tab.until("document.querySelector('#sla').value !== ''")
        await ask(tab)
        await ended(tab)
        assert await tab.text("#foreseen") == "Ended after 40 tokens"
        assert server.keys[0] is None and server.keys[-1] == "Bearer s3cret"
        kept = await tab.value("[sessionStorage.length, localStorage.length, document.cookie]")
        assert kept == [1, 0, ""]
        await opened(tab, server)  # still known in this tab
        assert not await tab.value("document.querySelector('#key-dialog').open")
    tab.complaints.clear()  # the browser itself remarks on a 401


async def test_what_is_read_aloud_is_little(tab: Tab) -> None:
    async with foreseeing() as server:
        await opened(tab, server)
        await tab.value(
            "window.said = 0; new MutationObserver((all) => said += all.length)"
            ".observe(document.querySelector('#spoken'), {childList: true})"
        )
        await ask(tab)
        await ended(tab)
        spoken = await tab.text("#spoken")
        assert spoken.endswith("Answer complete, 40 tokens.")
        assert "word1 word2" in spoken
        assert await tab.value("said") < 10


@pytest.mark.parametrize(("width", "height", "scheme"), SCREENS)
async def test_every_view_fits_its_screen_and_can_be_read(
    tab: Tab, width: int, height: int, scheme: str
) -> None:
    async with foreseeing(allowed=20) as server:
        await tab.look(width, height, scheme)
        await opened(tab, server)
        await tab.value(PROBES.read_text())
        await ask(tab)
        await tab.until("document.querySelector('#number-sent').innerText === '20'")
        for view in ("chat", "board", "why"):
            await tab.value(f"void (location.hash = '#{view}')")
            await tab.until(f"!document.querySelector('#view-{view}').hidden")
            assert await tab.value("document.documentElement.scrollWidth") == width
            await tab.shot(f"foreseen-{view}-{width}-{scheme}")
            for probe in ("overflowing", "unnamed", "pale"):
                assert await tab.value(f"probes.{probe}()") == [], (view, probe)
        await tab.value("void (location.hash = '#chat')")
        for part in ("#message", "#stop", "#bar", "#clocks"):
            box = await tab.value(
                f"document.querySelector('{part}').getBoundingClientRect().toJSON()"
            )
            assert box["left"] >= 0 and box["right"] <= width, part
            assert box["top"] >= 0 and box["bottom"] <= height, part
        await tab.press("Escape")
        await ended(tab)
