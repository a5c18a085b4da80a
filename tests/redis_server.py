"""A real redis-server with a password, which a test can kill and start again."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGSTOP

from redis import Redis
from redis.exceptions import RedisError

from foretoken.running.ports import free_port

PASSWORD = "do-not-show-this"


class RedisServer:
    """A redis-server that writes every command to its file before it answers."""

    def __init__(self, program: str, directory: Path):
        self.port = free_port()
        options = f"--port {self.port} --bind 127.0.0.1 --requirepass {PASSWORD} --appendonly yes"
        self._command = [program, *options.split(), "--dir", str(directory)]
        self.client = Redis.from_url(url(self.port))
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        until_s = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < until_s, "redis-server does not answer"
            time.sleep(0.01)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def stop(self) -> None:
        """Lets it answer nothing until `resume`."""
        self._process.send_signal(SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(SIGCONT)

    def _answers(self) -> bool:
        with suppress(RedisError):
            return bool(self.client.ping())
        return False


@contextmanager
def running_redis(program: str, directory: Path) -> Iterator[RedisServer]:
    """A server that keeps its data in the folder; killed at the end of the block."""
    server = RedisServer(program, directory)
    try:
        yield server
    finally:
        server.client.close()
        server.kill()


def url(port: int) -> str:
    return f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
