"""A command line's mistakes in a line each, with what would be right."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from typer.core import TyperCommand

from foretoken.commands.foreign import FOREIGN

MANY_VALUED = ("--train", "--data", "--predictor", "--server", "--compare")


class UsageError(ValueError):
    """A mistake on the command line; one line."""


class Command(TyperCommand):
    """Says what is unknown, and what was meant, in one line."""

    foreign: Mapping[str, str] = MappingProxyType({})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's Context, or typer's
        try:
            return super().parse_args(ctx, list(args))
        except Exception as error:
            unknown = getattr(error, "option_name", None)
            if unknown is None or not hasattr(error, "possibilities"):
                raise
            ours = {name for param in self.params for name in param.opts}
            raise UsageError(answer(unknown, args, ours, self.foreign)) from None


class ServeCommand(Command):
    """`foretoken serve`, which others' options are answered for."""

    foreign = FOREIGN


class ManyCommand(Command):
    """Lets `--train a b c` stand for `--train a --train b --train c`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's Context, or typer's
        return super().parse_args(ctx, spread(args))


def spread(args: Sequence[str]) -> list[str]:
    """Repeat a many-valued option before each of its further values."""
    out: list[str] = []
    option = ""
    for arg in args:
        if arg.startswith("-"):
            name = arg.partition("=")[0]
            option = name if name in MANY_VALUED else ""
        elif option and out[-1] != option:
            out.append(option)
        out.append(arg)
    return out


def answer(
    unknown: str, args: Sequence[str], ours: Iterable[str], foreign: Mapping[str, str]
) -> str:
    """What to say of an unknown option: all of theirs among `args` at once, else what is near."""
    ours = set(ours)
    named = dict.fromkeys(arg.partition("=")[0] for arg in args if arg.startswith("-"))
    theirs = [name for name in named if name in foreign and name not in ours]
    if unknown in theirs or any(name.startswith(unknown) for name in theirs):
        return "; ".join(_told(name, foreign[name]) for name in theirs)
    hint = near(unknown, ours) or "; --help lists what there is"
    return f"unknown option {unknown}{hint}"


def _told(name: str, said: str) -> str:
    return f"{name} is {said} here" if said.startswith("-") else f"{name} {said}"


def near(word: str, known: Iterable[str]) -> str:
    """`, did you mean …?` where one is like it."""
    close = get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""
