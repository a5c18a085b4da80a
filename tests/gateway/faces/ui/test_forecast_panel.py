"""Forecasts on the chat page in headless Chromium, against a fake server that streams them."""

from collections.abc import Callable

import pytest

from tests.chromium import Tab
from tests.gateway.faces.ui.chat_page import ANSWER, ask, open_chat, wait_until_ended
from tests.gateway.faces.ui.forecast_server import WORDS, forecast_after, serving_forecasts

pytestmark = pytest.mark.slow


def percent(tokens: float, scale: float) -> float:
    return round(100 * tokens / scale, 1)


async def bar(tab: Tab) -> dict[str, float]:
    """Positions of its parts, in percent of its width."""
    positions = await tab.value(
        """(() => {
          const bar = document.querySelector("#bar").getBoundingClientRect();
          const part = (name) => document.querySelector(`#bar .${name}`).getBoundingClientRect();
          const at = (x) => Math.round((x - bar.left) / bar.width * 1000) / 10;
          return {sent: at(part("sent").right), low: at(part("band").left),
                  high: at(part("band").right), expected: at(part("tick").left + 2)};
        })()"""
    )
    return dict(positions)


async def test_forecast_interval_narrows_with_each_token(tab: Tab) -> None:
    async with serving_forecasts(allowed=0) as server:
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        await tab.call("Emulation.setEmulatedMedia", features=[still])
        await open_chat(tab, server)
        await ask(tab)
        await tab.until("document.querySelector('#number-band').innerText === '12–96'")
        assert "first token expected within 0.41 s, SLA expected to be met" in await tab.text(
            "#promise"
        )
        widths = []
        # The bar's scale covers the first interval, and from 35 tokens on the one of that moment,
        # because the interval would fill less than half of the bar.
        for sent, longest in ((1, 96), (10, 96), (25, 96), (34, 96), (39, 47)):
            scale = longest * 1.04
            await server.allow(sent)
            await tab.until(f"document.querySelector('#number-sent').innerText === '{sent}'")
            drawn, forecast = await bar(tab), forecast_after(sent)
            for name, tokens in (
                ("sent", sent), ("low", forecast["low_tokens"]),
                ("high", forecast["high_tokens"]), ("expected", forecast["expected_tokens"]),
            ):  # fmt: skip
                assert drawn[name] == pytest.approx(percent(tokens, scale), abs=0.8), (sent, name)
            widths.append(drawn["high"] - drawn["low"])
            assert await tab.text(ANSWER) == "".join(WORDS[:sent]).strip()
        assert widths == sorted(widths, reverse=True) and widths[-1] < widths[0] / 4
        points = await tab.value("document.querySelector('#cone polyline').points.numberOfItems")
        assert points == 40  # before the first token and after each later one
        await server.allow(40)
        await wait_until_ended(tab)
        assert (await bar(tab))["sent"] == 100
        assert await tab.text("#forecast") == "Ended after 40 tokens"
        assert "First forecast: 48, 90 % within 12–96; the answer was inside." in await tab.text(
            "#ending"
        )
        assert server.bodies[0]["stream_options"] == {
            "include_usage": True, "include_forecast": True,
        }  # fmt: skip
        assert server.classes == ["interactive"]
        assert [url for url in tab.asked if not url.startswith(server.url)] == []


async def test_forecast_panel_shows_the_queue_until_a_forecast_arrives(tab: Tab) -> None:
    async with serving_forecasts(allowed=-1) as server:
        await open_chat(tab, server)
        await ask(tab)
        await tab.until("document.querySelector('#forecast-note').innerText !== ''")
        assert await tab.text("#forecast") == "Waiting for the forecast"
        assert await tab.text("#forecast-note") == (
            "Requests waiting: 44 to be read, 644 to run. Recent answers: 98 tokens on average."
        )
        assert await tab.text("#number-expected") == "…"
        await tab.shot("waiting")
        await server.allow(0)
        await tab.until("document.querySelector('#number-expected').innerText === '48'")
        assert await tab.text("#forecast-note") == ""
        await tab.press("Escape")
        await wait_until_ended(tab)


async def test_clocks_use_the_budgets_of_the_selected_class(tab: Tab) -> None:
    async with serving_forecasts() as server:
        await open_chat(tab, server)
        clocks = "[...document.querySelectorAll('#clocks > div')]"
        assert "of 60 s" in await tab.text("#clocks")
        await ask(tab)
        await wait_until_ended(tab)
        assert not await tab.value(f"{clocks}.some((row) => row.classList.contains('missed'))")
        await tab.value(
            "(() => {const s = document.querySelector('#sla'); s.value = 'hasty';"
            "s.dispatchEvent(new Event('change'))})()"
        )
        await ask(tab)
        await wait_until_ended(tab)
        assert server.classes == ["interactive", "hasty"]
        assert await tab.value(f"{clocks}.every((row) => row.classList.contains('missed'))")
        assert (await tab.text("#clocks")).count(", over") == 3
        roles = [turn["role"] for turn in server.bodies[1]["messages"]]
        assert roles == ["user", "assistant", "user"]


async def test_request_is_repeated_without_forecasts_if_the_server_refuses_them(tab: Tab) -> None:
    async with serving_forecasts(supports_forecasts=False) as server:
        await open_chat(tab, server)
        for _ in range(2):
            await ask(tab)
            await wait_until_ended(tab)
        options = [body["stream_options"].get("include_forecast") for body in server.bodies]
        assert options == [True, None, None]
        assert await tab.text("#forecast") == "Ended after 40 tokens"
        assert "This server sends no forecasts." in await tab.text("#ending")
    expected = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
    assert [each for each in tab.complaints if not each.startswith(expected)] == []
    tab.complaints.clear()


def forecast_too_short(sent: int) -> dict[str, float]:
    """A forecast of ten tokens that the answer outgrows."""
    high = max(10, sent)
    return {"expected_tokens": high, "low_tokens": max(4, sent), "high_tokens": high, "end_s": 1}


def forecast_too_long(sent: int) -> dict[str, float]:
    """A first forecast far above all later ones."""
    high = 4000 if sent < 2 else 40
    return {"expected_tokens": high, "low_tokens": sent, "high_tokens": high, "end_s": 1}


@pytest.mark.parametrize(
    ("forecast", "top"), [(forecast_after, 100), (forecast_too_short, 40), (forecast_too_long, 200)]
)
async def test_forecast_chart_has_axis_numbers_and_holds_all_points(
    tab: Tab, forecast: Callable[[int], dict[str, float]], top: int
) -> None:
    async with serving_forecasts(forecast=forecast, allowed=30) as server:
        await open_chat(tab, server)
        await ask(tab)
        await tab.until("document.querySelector('#number-sent').innerText === '30'")
        await tab.shot(f"chart-{forecast.__name__}")
        await server.allow(40)
        await wait_until_ended(tab)
        numbers = (
            "[...document.querySelectorAll('#cone-{} span')].map((each) => Number(each.innerText))"
        )
        y, x = [await tab.value(numbers.format(axis)) for axis in "yx"]
        assert (y[0], y[-1], x[0], x[-1]) == (0, top, 0, 40)
        assert y == sorted(y) and 2 < len(y) <= 6
        points = await tab.value(
            "[...document.querySelectorAll('#cone polyline, #cone polygon')]"
            ".flatMap((each) => [...each.points].flatMap(({x, y}) => [x, y]))"
        )
        assert min(points) >= 0 and max(points) <= 100
