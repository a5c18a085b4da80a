"""The chat page in headless Chromium, against a fake server that streams forecasts."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.chromium import Tab, browsing
from tests.gateway.faces.ui.forecast_server import (
    WORDS,
    ForecastServer,
    forecast_after,
    serving_forecasts,
)

pytestmark = pytest.mark.slow

SCREENS = [(1280, 800, "light"), (1280, 800, "dark"), (390, 740, "light"), (360, 740, "dark")]
ANSWER = ".assistant:last-of-type .content"
PROBES = Path(__file__).with_name("probes.js")


@pytest.fixture
async def tab(chromium_program: str) -> AsyncIterator[Tab]:
    async with browsing(chromium_program) as browser, browser.tab() as new_tab:
        await new_tab.look(1280, 800)
        yield new_tab
        assert new_tab.complaints == []


async def opened(tab: Tab, server: ForecastServer) -> None:
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
        await opened(tab, server)
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
        await ended(tab)
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


async def test_clocks_use_the_budgets_of_the_selected_class(tab: Tab) -> None:
    async with serving_forecasts() as server:
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


async def test_escape_stops_the_answer_and_closes_the_connection(tab: Tab) -> None:
    async with serving_forecasts(allowed=7) as server:
        await opened(tab, server)
        await ask(tab)
        await tab.until("document.querySelector('#number-sent').innerText === '7'")
        await tab.press("Escape")
        await ended(tab)
        assert await tab.text("#forecast") == "Stopped after 7 tokens"
        assert await tab.text(ANSWER) == "".join(WORDS[:7]).strip()
        assert await tab.value("document.querySelector('#chat-error').hidden")
        async with asyncio.timeout(30):
            while not server.disconnects:  # noqa: ASYNC110 - the fake server has no event for it
                await asyncio.sleep(0.02)


async def test_request_is_repeated_without_forecasts_if_the_server_refuses_them(tab: Tab) -> None:
    async with serving_forecasts(supports_forecasts=False) as server:
        await opened(tab, server)
        for _ in range(2):
            await ask(tab)
            await ended(tab)
        options = [body["stream_options"].get("include_forecast") for body in server.bodies]
        assert options == [True, None, None]
        assert await tab.text("#forecast") == "Ended after 40 tokens"
        assert "This server sends no forecasts." in await tab.text("#ending")
    expected = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
    assert [each for each in tab.complaints if not each.startswith(expected)] == []
    tab.complaints.clear()


async def test_refusal_is_shown_as_a_sentence(tab: Tab) -> None:
    refusal = (429, "1000 requests wait", {"retry-after": "3"})
    async with serving_forecasts(refusal=refusal) as server:
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
    tab.complaints.clear()  # the browser logs every 429


async def test_api_key_is_asked_for_and_kept_in_the_tab(tab: Tab) -> None:
    async with serving_forecasts(key="s3cret") as server:
        await tab.open(f"{server.url}/ui/")
        await tab.until("document.querySelector('#key-dialog').open")
        await tab.type("s3cret")
        await tab.press("Enter")
        await tab.until("document.querySelector('#sla').value !== ''")
        await ask(tab)
        await ended(tab)
        assert await tab.text("#forecast") == "Ended after 40 tokens"
        assert server.keys[0] is None and server.keys[-1] == "Bearer s3cret"
        kept = await tab.value("[sessionStorage.length, localStorage.length, document.cookie]")
        assert kept == [1, 0, ""]
        await opened(tab, server)  # the tab still has the key
        assert not await tab.value("document.querySelector('#key-dialog').open")
    tab.complaints.clear()  # the browser logs every 401


async def test_screen_reader_announces_sentences_not_tokens(tab: Tab) -> None:
    async with serving_forecasts() as server:
        await opened(tab, server)
        await tab.value(
            "window.changes = 0; new MutationObserver((all) => changes += all.length)"
            ".observe(document.querySelector('#announcements'), {childList: true})"
        )
        await ask(tab)
        await ended(tab)
        spoken = await tab.text("#announcements")
        assert spoken.endswith("Answer complete, 40 tokens.")
        assert "word1 word2" in spoken
        assert await tab.value("changes") < 10


@pytest.mark.parametrize(("width", "height", "scheme"), SCREENS)
async def test_every_view_fits_the_screen_and_has_readable_contrast(
    tab: Tab, width: int, height: int, scheme: str
) -> None:
    async with serving_forecasts(allowed=20) as server:
        await tab.look(width, height, scheme)
        await opened(tab, server)
        await tab.value(PROBES.read_text())
        await ask(tab)
        await tab.until("document.querySelector('#number-sent').innerText === '20'")
        for view in ("chat", "board", "why"):
            await tab.value(f"void (location.hash = '#{view}')")
            await tab.until(f"!document.querySelector('#view-{view}').hidden")
            assert await tab.value("document.documentElement.scrollWidth") == width
            await tab.shot(f"forecast-{view}-{width}-{scheme}")
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


async def test_wrong_api_key_is_reported_in_the_dialog(tab: Tab) -> None:
    error = "document.querySelector('#key-error')"
    async with serving_forecasts(key="s3cret") as server:
        await tab.open(f"{server.url}/ui/")
        await tab.until("document.querySelector('#key-dialog').open")
        assert await tab.value(f"{error}.hidden")
        await tab.type("wrong")
        await tab.press("Enter")
        await tab.until(f"!{error}.hidden && document.querySelector('#key-dialog').open")
        assert await tab.text("#key-error") == "The key was not accepted."
        assert await tab.value("document.querySelector('#key-text').value") == ""
        await tab.shot("key-not-accepted")
        await tab.type("s3cret")
        await tab.press("Enter")
        await tab.until("document.querySelector('#sla').value !== ''")
        await tab.value("void document.querySelector('#give-key').click()")
        await tab.until("document.querySelector('#key-dialog').open")
        assert await tab.value(f"{error}.hidden")  # a change of an accepted key is no error
    tab.complaints.clear()  # the browser logs every 401


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
        await opened(tab, server)
        await ask(tab)
        await tab.until("document.querySelector('#number-sent').innerText === '30'")
        await tab.shot(f"chart-{forecast.__name__}")
        await server.allow(40)
        await ended(tab)
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


MARKDOWN = """# Title

A **bold** and *italic* `code <b>` [link](https://example.org/a_(b)) line
with [bad](javascript:alert(1)) and <img src=x onerror=alert(1)> text, snake_case_name, 2 * 3 * 4.

- one
- two
  - nested
    1. deep
- three **open

3. third
4. fourth

> quoted `x`

```python
def f():

    return "**no**"
```

| a | b |
|---|--:|
| 1 | `x` \\| y |

---
Last ~~old~~ https://example.org/x."""


async def test_answer_is_rendered_as_markdown_without_interpreting_html(tab: Tab) -> None:
    words = [MARKDOWN[at : at + 3] for at in range(0, len(MARKDOWN), 3)]
    async with serving_forecasts(words=words, forecast=lambda _: forecast_after(40)) as server:
        await opened(tab, server)
        await ask(tab)
        await ended(tab)
        await tab.shot("markdown")
        html = await tab.value(f"document.querySelector('{ANSWER}').innerHTML")
        attributes = ' target="_blank" rel="noopener noreferrer nofollow"'
        assert html == (
            "<h4>Title</h4>"
            "<p>A <strong>bold</strong> and <em>italic</em> <code>code &lt;b&gt;</code> "
            f'<a href="https://example.org/a_(b)"{attributes}>link</a> line\n'
            "with bad and &lt;img src=x onerror=alert(1)&gt; text, snake_case_name, 2 * 3 * 4.</p>"
            '<ul><li>one</li><li>two<ul><li>nested<ol start="1"><li>deep</li></ol></li></ul></li>'
            '<li>three **open</li></ul><ol start="3"><li>third</li><li>fourth</li></ol>'
            "<blockquote><p>quoted <code>x</code></p></blockquote>"
            '<pre tabindex="0"><code data-language="python">'
            'def f():\n\n    return "**no**"</code></pre>'
            '<div class="scroll" tabindex="0"><table><thead><tr><th>a</th><th>b</th></tr></thead>'
            "<tbody><tr><td>1</td><td><code>x</code> | y</td></tr></tbody></table></div><hr>"
            f'<p>Last <s>old</s> <a href="https://example.org/x"{attributes}>'
            "https://example.org/x</a>.</p>"
        )


async def test_markdown_renderer_is_fast_on_hostile_text(tab: Tab) -> None:
    async with serving_forecasts() as server:
        await opened(tab, server)
        for text in ("*a " * 20_000, "[" * 20_000, "`" * 20_000, "> " * 20_000, "- " * 20_000,
                     "_*" * 20_000, "a|" * 20_000 + "\n" + "-|" * 20_000):  # fmt: skip
            took_ms = await tab.value(
                f"""import("./markdown.js").then(({{MarkdownView}}) => {{
                  const start = performance.now();
                  new MarkdownView(document.createElement("div")).render({json.dumps(text)});
                  return performance.now() - start;
                }})"""
            )
            assert took_ms < 5000, text[:10]


async def test_system_prompt_and_temperature_are_sent_and_remembered(tab: Tab) -> None:
    async with serving_forecasts() as server:
        await opened(tab, server)
        for name, value in (("system-prompt", "Answer in verse."), ("temperature", "0.3")):
            await tab.value("document.querySelector('.settings').open = true")
            await tab.value(f"document.querySelector('#{name}').focus()")
            await tab.type(value)
        assert await tab.text("#settings-summary") == ": system prompt, temperature 0.3"
        await tab.shot("settings")
        await ask(tab)
        await ended(tab)
        await opened(tab, server)  # the page is loaded again
        await ask(tab, "Again.")
        await ended(tab)
        for body, text in zip(server.bodies, ("Say forty words.", "Again."), strict=True):
            assert body["temperature"] == 0.3
            assert body["messages"] == [
                {"role": "system", "content": "Answer in verse."},
                {"role": "user", "content": text},
            ]
        await tab.value("localStorage.clear()")
        await opened(tab, server)
        await ask(tab)
        await ended(tab)
        assert "temperature" not in server.bodies[-1]
        assert [turn["role"] for turn in server.bodies[-1]["messages"]] == ["user"]


async def test_forecast_panel_shows_the_queue_until_a_forecast_arrives(tab: Tab) -> None:
    async with serving_forecasts(allowed=-1) as server:
        await opened(tab, server)
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
        await ended(tab)


@pytest.mark.parametrize("width", [320, 390])
async def test_sla_table_fits_a_phone(tab: Tab, width: int) -> None:
    async with serving_forecasts() as server:
        await tab.look(width, 800)
        await tab.open(f"{server.url}/ui/#board")
        await tab.until("document.querySelectorAll('#sla-rows tr').length === 4")
        cells = "[...document.querySelectorAll('.attainment :is(td, th)')]"
        right = f"Math.max(...{cells}.map((cell) => cell.getBoundingClientRect().right))"
        assert await tab.value(right) <= width
        clipped = "filter((cell) => cell.scrollWidth > cell.clientWidth + 1)"
        assert await tab.value(f"{cells}.{clipped}.map((cell) => cell.outerHTML)") == []
        assert "Missed because of: preempted 90" in await tab.value(
            "document.querySelector('.attainment').innerText"
            " + getComputedStyle(document.querySelector('tbody .causes'), '::before').content"
        ) or "preempted 90" in await tab.text("#sla-rows")
        await tab.value("document.querySelector('.attainment').scrollIntoView()")
        await tab.shot(f"attainment-{width}")
