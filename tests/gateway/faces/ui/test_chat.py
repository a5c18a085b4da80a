"""The chat page in headless Chromium, against a fake server that streams forecasts."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.chromium import Tab
from tests.gateway.faces.ui.chat_page import ANSWER, ask, open_chat, wait_until_ended
from tests.gateway.faces.ui.forecast_server import WORDS, forecast_after, serving_forecasts

pytestmark = pytest.mark.slow

SCREENS = [(1280, 800, "light"), (1280, 800, "dark"), (390, 740, "light"), (360, 740, "dark")]
PROBES = Path(__file__).with_name("probes.js")


async def test_escape_stops_the_answer_and_closes_the_connection(tab: Tab) -> None:
    async with serving_forecasts(allowed=7) as server:
        await open_chat(tab, server)
        await ask(tab)
        await tab.until("document.querySelector('#number-sent').innerText === '7'")
        await tab.press("Escape")
        await wait_until_ended(tab)
        assert await tab.text("#forecast") == "Stopped after 7 tokens"
        assert await tab.text(ANSWER) == "".join(WORDS[:7]).strip()
        assert await tab.value("document.querySelector('#chat-error').hidden")
        async with asyncio.timeout(30):
            while not server.disconnects:  # noqa: ASYNC110 - the fake server has no event for it
                await asyncio.sleep(0.02)


async def test_refusal_is_shown_as_a_sentence(tab: Tab) -> None:
    refusal = (429, "1000 requests wait", {"retry-after": "3"})
    async with serving_forecasts(refusal=refusal) as server:
        await open_chat(tab, server)
        await ask(tab)
        await wait_until_ended(tab)
        assert await tab.text("#chat-error") == "1000 requests wait. Try again in 3 s."
        assert await tab.value("document.querySelector('#chat-error').role") == "alert"
        server.refusal = None
        await ask(tab, "Again.")
        await wait_until_ended(tab)
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
        await wait_until_ended(tab)
        assert await tab.text("#forecast") == "Ended after 40 tokens"
        assert server.keys[0] is None and server.keys[-1] == "Bearer s3cret"
        kept = await tab.value("[sessionStorage.length, localStorage.length, document.cookie]")
        assert kept == [1, 0, ""]
        await open_chat(tab, server)  # the tab still has the key
        assert not await tab.value("document.querySelector('#key-dialog').open")
    tab.complaints.clear()  # the browser logs every 401


async def test_screen_reader_announces_sentences_not_tokens(tab: Tab) -> None:
    async with serving_forecasts() as server:
        await open_chat(tab, server)
        await tab.value(
            "window.changes = 0; new MutationObserver((all) => changes += all.length)"
            ".observe(document.querySelector('#announcements'), {childList: true})"
        )
        await ask(tab)
        await wait_until_ended(tab)
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
        await open_chat(tab, server)
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
        await wait_until_ended(tab)


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
        await open_chat(tab, server)
        await ask(tab)
        await wait_until_ended(tab)
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
        await open_chat(tab, server)
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
        await open_chat(tab, server)
        for name, value in (("system-prompt", "Answer in verse."), ("temperature", "0.3")):
            await tab.value("document.querySelector('.settings').open = true")
            await tab.value(f"document.querySelector('#{name}').focus()")
            await tab.type(value)
        assert await tab.text("#settings-summary") == ": system prompt, temperature 0.3"
        await tab.shot("settings")
        await ask(tab)
        await wait_until_ended(tab)
        await open_chat(tab, server)  # the page is loaded again
        await ask(tab, "Again.")
        await wait_until_ended(tab)
        for body, text in zip(server.bodies, ("Say forty words.", "Again."), strict=True):
            assert body["temperature"] == 0.3
            assert body["messages"] == [
                {"role": "system", "content": "Answer in verse."},
                {"role": "user", "content": text},
            ]
        await tab.value("localStorage.clear()")
        await open_chat(tab, server)
        await ask(tab)
        await wait_until_ended(tab)
        assert "temperature" not in server.bodies[-1]
        assert [turn["role"] for turn in server.bodies[-1]["messages"]] == ["user"]


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
