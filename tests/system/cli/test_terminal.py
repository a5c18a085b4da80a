"""The command on a real terminal: the status line, Ctrl-C, and a conversation."""

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.live import READY, ROOT, command, environment, serving

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A program on a terminal of 160 columns. `shown` is its output since the last match."""

    def __init__(self, *arguments: str):
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment(), "COLUMNS": "160", "TERM": "xterm"},
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(slave)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, limit_s: float = 90.0) -> re.Match[str]:
        """Wait for the pattern in the output since the last match; returns the match."""
        until = time.monotonic() + limit_s
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < until, f"{pattern!r} was not shown, but: {self.shown}"
            ready, _, _ = select.select([self._master], [], [], 0.5)
            if ready:
                raw = os.read(self._master, 65_536).decode(errors="replace")
                self.shown += ESCAPES.sub("", raw)
        self.shown = self.shown[found.end() :]
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def _own_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.slow
def test_serve_shows_a_status_line_and_stops_on_ctrl_c():
    with terminal("serve", "--http-port", "0", "--grpc-port", "0") as screen:
        screen.wait_for(READY.pattern)
        screen.wait_for(r"0 running · 0 waiting · KV 0% · 1 worker\(s\)")
        screen.type("\x03")
        assert screen.process.wait(30) == 0
        assert "Traceback" not in screen.shown


@pytest.mark.slow
def test_chat_streams_a_conversation():
    with serving() as live, terminal("chat", "--server", live.grpc) as screen:
        screen.wait_for(r"demo")
        screen.type("Reverse: red blue green\r")
        screen.wait_for(r"green blue red")
        screen.type("Sort: pear apple fig\r")
        screen.wait_for(r"apple fig pear")
        screen.type("/exit\r")
        assert screen.process.wait(10) == 0


@pytest.mark.slow
def test_chat_over_http_accepts_commands():
    with serving() as live, terminal("chat", "--server", f"{live.http}/v1") as screen:
        screen.wait_for(r"demo at http")
        screen.type("/help\r")
        screen.wait_for(r"/system TEXT")
        screen.type("Reverse: red blue green\r")
        screen.wait_for(r"green blue red")
        screen.type("/quit\r")
        assert screen.process.wait(10) == 0


@pytest.mark.slow
def test_chat_reports_an_unreachable_server_in_one_line():
    done = subprocess.run(
        command("chat", "--server", "127.0.0.1:9"),
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        cwd=ROOT,
    )
    message = done.stdout + done.stderr
    assert "127.0.0.1:9" in message and "Traceback" not in message
