"""Examples of README and `docs/`: the fenced `sh` and `python` blocks, and how to run them.

A block is preceded by a comment where it needs one: `<!-- not run: reason -->` for a block that a
test machine cannot run, `<!-- prints: text -->` for the output to expect.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.live import ROOT, Live

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|prints): (?P<text>.*?) -->\n)?"
    r"^```(?P<language>sh|python)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
RUNNER = Path(__file__).with_name("run_until_ready.py")
RUN_S = 240.0


@dataclass(frozen=True)
class Example:
    """One fenced block; `name` is its page and line."""

    name: str
    language: str
    code: str
    not_run: str = ""
    prints: str = ""

    def run(self, live: Live, folder: Path) -> str:
        """Run the block as printed, against `live`, in `folder`; returns its output.

        A command that starts a server runs on free ports until the server is ready, and is then
        interrupted. Fails unless the exit status is 0.
        """
        code = self.code.replace("http://127.0.0.1:8000", live.http)
        code = code.replace("127.0.0.1:50051", live.grpc)
        interpreter = [sys.executable, "-c"] if self.language == "python" else ["bash", "-ec"]
        prelude = "" if self.language == "python" else _shell_prelude()
        done = subprocess.run(
            [*interpreter, prelude + code],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0, f"{self.name}: {done.stdout}\n{done.stderr}"
        return _join_chunks(done.stdout)


def collect() -> Iterator[Example]:
    """Yield every example, page by page."""
    for page in PAGES:
        text = page.read_text()
        for found in BLOCK.finditer(text):
            mark, note = found["mark"] or "", found["text"] or ""
            line = text.count("\n", 0, found.start()) + 1
            yield Example(
                f"{page.relative_to(ROOT)}:{line}",
                found["language"],
                found["code"],
                note if mark == "not run" else "",
                note if mark == "prints" else "",
            )


def _shell_prelude() -> str:
    """Shell functions that replace `foretoken` and `make`; a function wins over PATH."""
    run = f"{sys.executable} {RUNNER}"
    return (
        f"export PATH={Path(sys.executable).parent}:$PATH\n"
        f'foretoken() {{ {run} foretoken "$@"; }}\n'
        f'make() {{ {run} make "$@"; }}\n'
    )


def _join_chunks(output: str) -> str:
    """Join the text of server-sent events; other output is returned as it is."""
    parts = re.findall(r'"content": ?"([^"]*)"', output) if "data: " in output else []
    return "".join(parts) if parts else output
