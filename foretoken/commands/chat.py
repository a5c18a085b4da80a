"""`foretoken chat`: a conversation in the terminal, streamed over gRPC or, of any OpenAI-compatible
server, over HTTP."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from foretoken.client.address import API_KEY_VARIABLE, DEFAULT_ADDRESS

if TYPE_CHECKING:
    from rich.console import Console

    from foretoken.client.answers import Chunk

Turns = list[dict[str, str]]
ENDINGS = {"length": "cut at max_tokens", "deadline": "cut at the deadline"}
FOOT = "Ctrl-C stops an answer, Ctrl-D leaves, /help tells more"


class Answering(Protocol):
    """An answer on its way."""

    def __iter__(self) -> "Iterator[Chunk]": ...
    def cancel(self) -> None: ...


Ask = Callable[[Turns], Answering]


def chat(
    address: Annotated[
        str, typer.Option(help="gRPC address, or http://host:port of any OpenAI-compatible server.")
    ] = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="Model.", show_default="the served one")] = "",
    system: Annotated[str, typer.Option(help="System prompt.", show_default="none")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens.", show_default="the server's")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy.", show_default="the server's")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="For the same answers again.", show_default="none")
    ] = None,
    sla: Annotated[str, typer.Option(help="SLA class.", show_default="the server's")] = "",
    api_key: Annotated[
        str,
        typer.Option(
            envvar=API_KEY_VARIABLE,
            metavar="KEY",
            help="Where the server wants one.",
            show_default="none",
        ),
    ] = "",
) -> None:
    """Talk to the model. Ctrl-C cancels an answer; Ctrl-D or /exit leaves."""
    from rich.console import Console

    from foretoken.client.errors import ForetokenError

    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = {key: value for key, value in given.items() if value is not None}
    console = Console(highlight=False, soft_wrap=True)
    reach = _over_http if address.startswith(("http://", "https://")) else _over_grpc
    with reach(address, api_key) as (models, generate):
        try:
            name = model or _first(models(), address)
        except ForetokenError as error:
            console.print(f"foretoken chat: {error}", style="red", markup=False)
            raise typer.Exit(1) from None
        console.print(f"{name} at {address} — {FOOT}", style="dim")
        Conversation(lambda turns: generate(turns, name, sla, options), console, system).run()


Generate = Callable[[Turns, str, str, Mapping[str, Any]], Answering]
Reached = tuple[Callable[[], list[str]], Generate]


@contextmanager
def _over_grpc(address: str, api_key: str) -> Iterator[Reached]:
    from foretoken.client.client import Client

    with Client(address, api_key) as client:
        yield (
            client.models,
            lambda turns, model, sla, options: client.generate(
                messages=turns, model=model, sla=sla or None, application="chat", **options
            ),
        )


@contextmanager
def _over_http(address: str, api_key: str) -> Iterator[Reached]:
    from foretoken.client.http import HttpServer

    server = HttpServer(address, api_key)
    yield (
        server.models,
        lambda turns, model, sla, options: server.generate(turns, model, sla, **options),
    )


def _first(models: list[str], address: str) -> str:
    if not models:
        raise ValueError(f"{address} serves no model")
    return models[0]


class Conversation:
    """The turns so far. A cancelled or failed answer leaves what was shown, or takes its
    question back when nothing was."""

    def __init__(self, ask: Ask, console: "Console", system: str = ""):
        self.turns: Turns = []
        self._ask, self._console = ask, console
        self._system(system)
        self.over = False

    def run(self) -> None:
        while not self.over and (said := self._read()) is not None:
            if said:
                self.take(said)

    def take(self, said: str) -> None:
        """A command, or a question; two slashes begin a question that begins with one."""
        if said.startswith("//"):
            self.say(said[1:])
        elif said.startswith("/"):
            self._obey(*said.partition(" ")[::2])
        else:
            self.say(said)

    def say(self, said: str) -> None:
        """One question, and its answer as it comes."""
        self.turns.append({"role": "user", "content": said})
        answer = self._stream()
        if answer:
            self.turns.append({"role": "assistant", "content": answer})
        else:
            self.turns.pop()

    def _obey(self, command: str, rest: str) -> None:
        if command in COMMANDS:
            COMMANDS[command].do(self, rest.strip())
        else:
            self._note(f"there is no command {command}; /help lists them")

    def _help(self, _: str) -> None:
        width = max(len(f"{name} {each.takes}") for name, each in COMMANDS.items())
        for name, each in COMMANDS.items():
            self._note(f"{f'{name} {each.takes}':<{width}}  {each.about}")

    def _leave(self, _: str) -> None:
        self.over = True

    def _clear(self, _: str) -> None:
        self.turns = [turn for turn in self.turns if turn["role"] == "system"]
        self._note("forgotten")

    def _change(self, text: str) -> None:
        self._system(text)
        self._note("the system prompt is set" if text else "there is no system prompt")

    def _system(self, text: str) -> None:
        said = [turn for turn in self.turns if turn["role"] != "system"]
        self.turns = [*([{"role": "system", "content": text}] if text else []), *said]

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def _read(self) -> str | None:
        try:
            return self._console.input("[bold green]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None

    def _stream(self) -> str:
        from foretoken.client.errors import ForetokenError

        text = ""
        stream = self._ask(self.turns)
        try:
            for chunk in stream:
                text += chunk.text
                self._console.print(chunk.text, end="", markup=False)
                if chunk.finish_reason and (note := ENDINGS.get(chunk.finish_reason.value)):
                    self._console.print(f" [{note}]", end="", style="dim", markup=False)
        except KeyboardInterrupt:
            stream.cancel()
            self._console.print(" [cancelled]", end="", style="dim", markup=False)
        except ForetokenError as error:
            self._console.print(str(error), end="", style="red", markup=False)
        self._console.print()
        return text


@dataclass(frozen=True)
class Spoken:
    """A command within the conversation: what it takes, what it does, and the doing."""

    takes: str
    about: str
    do: Callable[[Conversation, str], None]


COMMANDS: Mapping[str, Spoken] = {
    "/help": Spoken("", "what there is", Conversation._help),
    "/system": Spoken("TEXT", "another system prompt; without a text, none", Conversation._change),
    "/clear": Spoken("", "forget all but the system prompt", Conversation._clear),
    "/exit": Spoken("", "leave", Conversation._leave),
    "/quit": Spoken("", "leave", Conversation._leave),
}
