"""`foretoken chat`: a conversation in the terminal, streamed over gRPC."""

from collections.abc import Callable
from typing import Annotated, cast

import typer
from rich.console import Console

from foretoken.answers import SamplingOptions
from foretoken.client import DEFAULT_ADDRESS, Client, Stream
from foretoken.errors import ForetokenError
from services.core import FinishReason

EXIT = "/exit"
ENDINGS = {
    FinishReason.LENGTH: "cut at max_tokens",
    FinishReason.DEADLINE: "cut at the deadline",
}


def chat(
    address: Annotated[str, typer.Option(help="gRPC address of the server.")] = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="Model; empty: the served one.")] = "",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="For the same answers again.")] = None,
    sla: Annotated[str, typer.Option(help="SLA class.")] = "",
) -> None:
    """Talk to the model. Ctrl-C cancels an answer; Ctrl-D or /exit leaves."""
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options = cast(SamplingOptions, {k: v for k, v in given.items() if v is not None})
    console = Console(highlight=False, soft_wrap=True)
    with Client(address) as client:
        try:
            name = model or client.models()[0]
        except ForetokenError as error:
            console.print(f"foretoken chat: {error}", style="red", markup=False)
            raise typer.Exit(1) from None
        console.print(f"{name} at {address} — Ctrl-C stops an answer, Ctrl-D leaves", style="dim")
        Conversation(
            lambda turns: client.generate(
                messages=turns, model=name, sla=sla or None, application="chat", **options
            ),
            console,
            system,
        ).run()


class Conversation:
    """The turns so far. A cancelled or failed answer leaves what was shown, or takes its
    question back when nothing was."""

    def __init__(
        self, ask: Callable[[list[dict[str, str]]], Stream], console: Console, system: str = ""
    ):
        self.turns = [{"role": "system", "content": system}] if system else []
        self._ask, self._console = ask, console

    def run(self) -> None:
        while (said := self._read()) is not None:
            if said:
                self.say(said)

    def say(self, said: str) -> None:
        """One question, and its answer as it comes."""
        self.turns.append({"role": "user", "content": said})
        answer = self._stream()
        if answer:
            self.turns.append({"role": "assistant", "content": answer})
        else:
            self.turns.pop()

    def _read(self) -> str | None:
        try:
            said = self._console.input("[bold green]> [/]").strip()
        except (EOFError, KeyboardInterrupt):
            self._console.print()
            return None
        return None if said == EXIT else said

    def _stream(self) -> str:
        text = ""
        stream = self._ask(self.turns)
        try:
            for chunk in stream:
                text += chunk.text
                self._console.print(chunk.text, end="", markup=False)
                if chunk.finish_reason in ENDINGS:
                    note = f" [{ENDINGS[chunk.finish_reason]}]"
                    self._console.print(note, end="", style="dim", markup=False)
        except KeyboardInterrupt:
            stream.cancel()
            self._console.print(" [cancelled]", end="", style="dim", markup=False)
        except ForetokenError as error:
            self._console.print(str(error), end="", style="red", markup=False)
        self._console.print()
        return text
