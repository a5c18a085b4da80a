"""`foretoken chat`: a conversation in the terminal, over gRPC or an OpenAI-compatible server."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from foretoken.client.address import (
    DEFAULT_SERVER,
    GrpcAddress,
    HttpAddress,
    ServerAddress,
    resolve_server,
)
from foretoken.commands.options import ApiKeyOption, ServerOption, describe_failure

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.client.answers import Chunk

Turns = list[dict[str, str]]
FINISH_NOTES = {"length": "cut at max_tokens", "deadline": "cut at the deadline"}
HINT = "Ctrl-C stops an answer, Ctrl-D exits, /help lists commands"


class AnswerStream(Protocol):
    """An answer that is being received."""

    def __iter__(self) -> "Iterator[Chunk]": ...
    def cancel(self) -> None: ...


Generate = Callable[[Turns], AnswerStream]


def chat(
    server: ServerOption = DEFAULT_SERVER,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model name.", show_default="the served model")
    ] = "",
    system: Annotated[
        str, typer.Option(metavar="TEXT", help="System prompt.", show_default="none")
    ] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens.", show_default="the server's")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", show_default="the server's")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Sampling seed, to repeat an answer.", show_default="none")
    ] = None,
    sla: Annotated[
        str, typer.Option(metavar="CLASS", help="SLA class.", show_default="the server's")
    ] = "",
    api_key: ApiKeyOption = "",
) -> None:
    """Talk to the model. Ctrl-C cancels an answer; Ctrl-D or /exit leaves.

    With input from a pipe, each line is one question and stdout holds the answers alone.
    """
    from rich.console import Console

    from foretoken.client.errors import ForetokenError

    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    answers = Console(highlight=False, soft_wrap=True)
    notes = Console(highlight=False, soft_wrap=True, stderr=True)
    with _connect(resolve_server(server), api_key) as (list_models, generate):
        try:
            name = model or _first(list_models(), server)
        except ForetokenError as error:
            message = f"foretoken chat: {describe_failure(error)}"
            notes.print(message, style="red", markup=False)
            raise typer.Exit(1) from None
        notes.print(f"{name} at {server} — {HINT}", style="dim")
        conversation = Conversation(
            lambda turns: generate(turns, name, sla, options), answers, notes, system
        )
        conversation.run()
    if conversation.failed and not sys.stdin.isatty():
        raise typer.Exit(1)


GenerateAt = Callable[[Turns, str, str, Mapping[str, Any]], AnswerStream]
Connection = tuple[Callable[[], list[str]], GenerateAt]


@contextmanager
def _connect(server: ServerAddress, api_key: str) -> Iterator[Connection]:
    from foretoken.client.client import Client
    from foretoken.client.http import HttpServer

    match server:
        case HttpAddress():
            over_http = HttpServer(server, api_key)
            yield (
                over_http.models,
                lambda turns, model, sla, options: over_http.generate(turns, model, sla, **options),
            )
        case GrpcAddress():
            with Client(server.target, api_key) as client:
                yield (
                    client.models,
                    lambda turns, model, sla, options: client.generate(
                        messages=turns,
                        model=model,
                        sla=sla or None,
                        application="chat",
                        **options,
                    ),
                )


def _first(models: list[str], server: str) -> str:
    if not models:
        raise ValueError(f"{server} serves no model")
    return models[0]


class Conversation:
    """The turns so far, and the loop that extends them.

    A cancelled or failed answer keeps the text that was shown; without any, its question is
    removed again. Answers go to stdout, everything else to stderr.
    """

    def __init__(
        self, generate: Generate, answers: "Console", notes: "Console", system: str = ""
    ) -> None:
        self.turns: Turns = []
        self.failed = False
        self._generate, self._answers, self._notes = generate, answers, notes
        self._over = False
        self._set_system(system)

    def run(self) -> None:
        """Reads lines until the input ends or the user leaves."""
        while not self._over and (line := self._read()) is not None:
            if line:
                self.handle(line)

    def handle(self, line: str) -> None:
        """Runs a command or asks a question; `//` begins a question that starts with a slash."""
        if line.startswith("//"):
            self.ask(line[1:])
        elif line.startswith("/"):
            self._run_command(*line.partition(" ")[::2])
        else:
            self.ask(line)

    def ask(self, question: str) -> None:
        """Sends one question and prints its answer as it arrives."""
        self.turns.append({"role": "user", "content": question})
        answer = self._stream()
        if answer:
            self.turns.append({"role": "assistant", "content": answer})
        else:
            self.turns.pop()

    def _run_command(self, name: str, rest: str) -> None:
        if name in COMMANDS:
            COMMANDS[name].run(self, rest.strip())
        else:
            self._note(f"unknown command {name}; /help lists commands")

    def _help(self, _: str) -> None:
        width = max(len(f"{name} {each.argument}") for name, each in COMMANDS.items())
        for name, each in COMMANDS.items():
            self._note(f"{f'{name} {each.argument}':<{width}}  {each.about}")

    def _leave(self, _: str) -> None:
        self._over = True

    def _clear(self, _: str) -> None:
        self.turns = [turn for turn in self.turns if turn["role"] == "system"]
        self._note("conversation cleared")

    def _change_system(self, text: str) -> None:
        self._set_system(text)
        self._note("system prompt set" if text else "system prompt removed")

    def _set_system(self, text: str) -> None:
        rest = [turn for turn in self.turns if turn["role"] != "system"]
        self.turns = [*([{"role": "system", "content": text}] if text else []), *rest]

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False)

    def _read(self) -> str | None:
        """Returns the next line without its ends; None at the end of the input."""
        interactive = sys.stdin.isatty()
        try:
            return self._notes.input("[bold green]> [/]" if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            if interactive:
                self._notes.print()
            return None

    def _stream(self) -> str:
        from foretoken.client.errors import ForetokenError

        text = ""
        stream = self._generate(self.turns)
        try:
            for chunk in stream:
                text += chunk.text
                self._answers.print(chunk.text, end="", markup=False)
                if chunk.finish_reason and (note := FINISH_NOTES.get(chunk.finish_reason.value)):
                    self._note_inline(f" [{note}]", "dim")
        except KeyboardInterrupt:
            stream.cancel()
            self._note_inline(" [cancelled]", "dim")
        except ForetokenError as error:
            self.failed = True
            self._note_inline(str(error), "red")
        self._answers.print()
        return text

    def _note_inline(self, text: str, style: str) -> None:
        self._notes.print(text, end="" if sys.stdout.isatty() else "\n", style=style, markup=False)


@dataclass(frozen=True)
class Command:
    """A command inside the conversation."""

    argument: str
    about: str
    run: Callable[[Conversation, str], None]


COMMANDS: Mapping[str, Command] = {
    "/help": Command("", "list commands", Conversation._help),
    "/system": Command(
        "TEXT", "set the system prompt; without TEXT, remove it", Conversation._change_system
    ),
    "/clear": Command("", "forget all turns except the system prompt", Conversation._clear),
    "/exit": Command("", "leave", Conversation._leave),
    "/quit": Command("", "leave", Conversation._leave),
}
