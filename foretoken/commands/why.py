"""`foretoken why`: prints the decisions about one request, from a server or an event log."""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import typer

from foretoken.client.address import DEFAULT_SERVER, resolve_server
from foretoken.commands.options import ApiKeyOption, ServerOption, describe_failure

UNBOUNDED = 2**31  # stories to keep while replaying a log


class Line(Protocol):
    """A line of a story, from a server or from a log."""

    @property
    def at_s(self) -> float: ...
    @property
    def text(self) -> str: ...
    @property
    def times(self) -> int: ...
    @property
    def until_s(self) -> float: ...


def why(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Request id of an answer (chatcmpl-…, cmpl-…, resp_…, msg_…), or its beginning.",
        ),
    ],
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay an event log (scheduler.event_log) instead of asking a server.",
            show_default="none",
        ),
    ] = None,
    server: ServerOption = DEFAULT_SERVER,
    api_key: ApiKeyOption = "",
) -> None:
    """Explain a request: its forecast, queueing, placement, preemptions and how it ended."""
    from foretoken.client.errors import ForetokenError
    from services.runtime.errors import ServiceError

    try:
        lines = list(
            _read_log(request_id, log) if log else _ask_server(request_id, server, api_key)
        )
    except (ForetokenError, ServiceError) as error:
        print(f"foretoken why: {describe_failure(error)}", file=sys.stderr)
        raise typer.Exit(1) from None
    for line in lines:
        print(line)


def _read_log(request_id: str, log: Path) -> Iterator[str]:
    from services.scheduler.observe.lookup import find_stories
    from services.scheduler.observe.replay import replay

    try:
        run = replay(log, UNBOUNDED)
    except OSError as error:
        raise ValueError(f"--log: cannot read {log}: {error.strerror}") from None
    if run.differing:
        version = run.head.written_by or "another version"
        yield (
            f"{run.differing} of {run.steps} steps differ from the log, which foretoken {version} "
            "wrote; the lines below are what this version decides"
        )
    yield f"preset {run.head.preset.name}, {run.steps} steps in {log}"
    for story in find_stories(request_id, run.recorder, run.state):
        yield from _format_story(story.request_id, story.live, story.lines)
        if verdict := run.judge.verdicts.get(story.request_id):
            yield from _wrap(f"{story.lines[-1].at_s:10.3f} s  ", verdict)


def _ask_server(request_id: str, server: str, api_key: str) -> Iterator[str]:
    from foretoken.client.stories import fetch_stories

    for story in fetch_stories(request_id, resolve_server(server), api_key):
        yield from _format_story(story.request_id, story.live, story.chapters)


def _format_story(request_id: str, live: bool, lines: Sequence[Line]) -> Iterator[str]:
    yield f"{request_id}, {'running' if live else 'ended'}; times in seconds since its arrival"
    for line in lines:
        text = line.text
        if line.times > 1:
            text += f" ({line.times} times, until {line.until_s:.3f} s)"
        yield from _wrap(f"{line.at_s:10.3f} s  ", text)


def _wrap(lead: str, text: str) -> Sequence[str]:
    """Wraps to the width of the terminal, keeping the times in a column; a pipe gets one line."""
    if not sys.stdout.isatty():
        return [lead + text]
    width = max(60, shutil.get_terminal_size().columns)
    return textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=" " * len(lead))
