"""`foretoken why`: what was decided of a request and why, from a server or from an event log."""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from foretoken.client.address import DEFAULT_ADDRESS

if TYPE_CHECKING:
    from protos.generated import scheduler_pb2

ASK_S = 15.0
ALL = 2**31  # stories kept of a log: every one


class Told(Protocol):
    """A line of a story, from a message or from a log."""

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
            metavar="ID", help="As an answer gave it (chatcmpl-…, cmpl-…), or its beginning."
        ),
    ],
    log: Annotated[
        Path | None, typer.Option(help="An event log (scheduler.event_log) to replay.")
    ] = None,
    server: Annotated[
        str, typer.Option(help="gRPC address of a server, or of its scheduler.")
    ] = DEFAULT_ADDRESS,
) -> None:
    """Tell a request's story: forecast, place in line and why, where it ran and how it ended."""
    from foretoken.client.errors import ForetokenError
    from services.runtime.errors import ServiceError

    try:
        lines = list(_from_log(request_id, log) if log else _from_server(request_id, server))
    except (ForetokenError, ServiceError) as error:
        print(f"foretoken why: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    for line in lines:
        print(line)


def _from_log(request_id: str, log: Path) -> Iterator[str]:
    from services.scheduler.observe.lookup import find_stories
    from services.scheduler.observe.replay import replay

    try:
        run = replay(log, ALL)
    except OSError as error:
        raise ValueError(f"cannot read {log}: {error.strerror}") from None
    if run.differing:
        by = run.head.written_by or "another version"
        yield (
            f"{run.differing} of {run.steps} steps come out otherwise here than where {log} was "
            f"written (foretoken {by}): what follows is what this version would do"
        )
    yield f"preset {run.head.preset.name}, {run.steps} steps in {log}"
    for story in find_stories(request_id, run.recorder, run.state):
        yield from _told(story.request_id, story.live, story.lines)
        if verdict := run.judge.verdicts.get(story.request_id):
            yield from _wrapped(f"{story.lines[-1].at_s:10.3f} s  ", verdict)


def _from_server(request_id: str, server: str) -> Iterator[str]:
    for story in _ask(request_id, server).stories:
        yield from _told(story.request_id, story.live, story.chapters)


def _ask(request_id: str, server: str) -> "scheduler_pb2.WhyResponse":
    """A gateway's answer, or a scheduler's where that is what listens there."""
    import grpc

    from foretoken.client.errors import from_status
    from protos.generated import gateway_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
    from services.runtime.channel import OPTIONS

    request = scheduler_pb2.WhyRequest(request_id=request_id)
    with grpc.insecure_channel(server, options=OPTIONS) as channel:
        try:
            return gateway_pb2_grpc.GatewayStub(channel).Why(request, timeout=ASK_S)
        except grpc.RpcError as error:
            failed = error
        if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
            try:
                return scheduler_pb2_grpc.SchedulerStub(channel).Why(request, timeout=ASK_S)
            except grpc.RpcError as error:
                failed = error
    raise from_status(failed.code(), failed.details(), (), server)


def _told(request_id: str, live: bool, lines: "Sequence[Told]") -> Iterator[str]:
    yield f"{request_id}, {'live' if live else 'ended'}; seconds since it arrived"
    for line in lines:
        text = line.text
        if line.times > 1:
            text += f" ({line.times} times, until {line.until_s:.3f} s)"
        yield from _wrapped(f"{line.at_s:10.3f} s  ", text)


def _wrapped(lead: str, text: str) -> Sequence[str]:
    """On a terminal as wide as that, with the times standing free."""
    if not sys.stdout.isatty():
        return [lead + text]
    width = max(60, shutil.get_terminal_size().columns)
    return textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=" " * len(lead))
