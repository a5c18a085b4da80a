"""Headless Chromium for tests, controlled over the DevTools protocol on a pipe, without a port or a
web driver.

https://chromedevtools.github.io/devtools-protocol: JSON messages, each ended by a zero byte, which
the browser reads from descriptor 3 and writes to 4.
"""

import asyncio
import base64
import fcntl
import json
import os
import re
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LIMIT_S = 60.0  # of any wait, after which a test fails
POLL_S = 0.03
SHOTS = os.environ.get("PAGE_SHOTS", "")  # a folder for screenshots; empty: none are saved
MOST_MESSAGE_BYTES = 2**26  # a screenshot
FIRST_FREE = 10  # above the descriptors 3 and 4, which the browser needs
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
    "--disable-extensions", "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe", "about:blank",
)  # fmt: skip
TROUBLE = {"error", "warning", "assert"}
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}

Message = dict[str, Any]


@dataclass
class Wire:
    """Sends commands and receives answers and events, which are passed to their session."""

    reader: asyncio.StreamReader
    descriptor: int
    sinks: dict[str, Callable[[str, Message], None]] = field(default_factory=dict)
    _waiting: dict[int, asyncio.Future[Message]] = field(default_factory=dict)
    _last: int = 0

    async def call(self, method: str, session: str = "", **params: Any) -> Message:
        """The result of a command. Raises AssertionError with the browser's error."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        answer = self._waiting[self._last] = asyncio.get_running_loop().create_future()
        os.write(self.descriptor, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(LIMIT_S):
            reported = await answer
        assert "error" not in reported, f"{method}: {reported['error']}"
        result: Message = reported["result"]
        return result

    async def read(self) -> None:
        """Reads until cancelled. If the browser exits, pending calls fail."""
        try:
            await self._read()
        except asyncio.IncompleteReadError:
            for answer in filter(lambda each: not each.done(), self._waiting.values()):
                answer.set_exception(AssertionError("the browser has ended"))

    async def _read(self) -> None:
        while True:
            message = json.loads((await self.reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                answer = self._waiting.pop(message["id"], None)
                if answer and not answer.done():  # the caller of a late answer has timed out
                    answer.set_result(message)
            elif sink := self.sinks.get(message.get("sessionId", "")):
                sink(message["method"], message["params"])


@dataclass
class Tab:
    """One page; records its errors and requests from the start."""

    wire: Wire
    session: str
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)  # URLs

    async def call(self, method: str, **params: Any) -> Message:
        return await self.wire.call(method, self.session, **params)

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Emulates a screen of that size with that preferred colour scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        reported = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in reported, f"{expression}: {reported['exceptionDetails']}"
        return reported["result"].get("value")

    async def until(self, expression: str, limit_s: float = LIMIT_S) -> Any:
        """The expression's value once it is true."""
        try:
            async with asyncio.timeout(limit_s):
                while not (found := await self.value(expression)):  # noqa: ASYNC110 - there is no event
                    await asyncio.sleep(POLL_S)
                return found
        except TimeoutError:
            shown = await self.text("body")
            raise AssertionError(
                f"{expression} is not true after {limit_s} s; the page shows: {shown[:2000]}"
            ) from None

    async def text(self, selector: str) -> str:
        """The visible text of an element."""
        found = await self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return re.sub(r"\s+", " ", str(found)).strip()

    async def click(self, selector: str) -> None:
        """Clicks on the first line of an element with the mouse, as a user would."""
        place = await self.value(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{block: "nearest"}});
              const box = element.getClientRects()[0];
              return {{x: box.x + box.width / 2, y: box.y + box.height / 2}};
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place
            )

    async def type(self, text: str) -> None:
        """Types into the focused element."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        typed = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **code, **typed)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    async def shot(self, name: str) -> None:
        """Saves a screenshot if PAGE_SHOTS names a folder."""
        if SHOTS:
            shot = await self.call("Page.captureScreenshot", format="png")
            image = base64.b64decode(shot["data"])
            Path(SHOTS, f"{name}.png").write_bytes(image)  # noqa: ASYNC240 - a test may wait

    def on_event(self, method: str, params: Message) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.complaints.append(str(details.get("exception", details).get("description")))
            case "Runtime.consoleAPICalled" if params["type"] in TROUBLE:
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in TROUBLE:
                entry = params["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")


@dataclass(frozen=True)
class Browser:
    wire: Wire

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """A new page with separate cookies, storage and cache."""
        context = await self.wire.call("Target.createBrowserContext")
        target = await self.wire.call("Target.createTarget", url="about:blank", **context)
        attached = await self.wire.call("Target.attachToTarget", flatten=True, **target)
        tab = Tab(self.wire, attached["sessionId"])
        self.wire.sinks[tab.session] = tab.on_event
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.call(f"{domain}.enable")
        try:
            yield tab
        finally:
            del self.wire.sinks[tab.session]
            await self.wire.call("Target.disposeBrowserContext", **context)


@asynccontextmanager
async def browsing(program: str) -> AsyncIterator[Browser]:
    """A browser that runs during the block."""
    theirs_in, ours_out = _pipe()
    ours_in, theirs_out = _pipe()
    with TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = await _start(program, profile, theirs_in, theirs_out)
        os.close(theirs_in)
        os.close(theirs_out)
        reader = asyncio.StreamReader(limit=MOST_MESSAGE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb")
        )
        wire = Wire(reader, ours_out)
        reading = asyncio.ensure_future(wire.read())
        try:
            yield Browser(wire)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            transport.close()
            os.close(ours_out)
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def _start(program: str, profile: str, reads: int, writes: int) -> Process:
    """Starts the browser with the pipes as descriptors 3 and 4."""
    script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    return await asyncio.create_subprocess_exec(
        "bash", "-c", script, "bash", str(reads), str(writes),
        program, f"--user-data-dir={profile}", *FLAGS,
        pass_fds=(reads, writes), stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL,
        env={**os.environ, "HOME": profile},
    )  # fmt: skip


def _pipe() -> tuple[int, int]:
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
