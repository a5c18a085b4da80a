"""Reports each mistake on the command line in one line, with a suggestion."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from typer.core import TyperCommand

from foretoken.commands.foreign_options import FOREIGN

MANY_VALUED = ("--train", "--data", "--predictor", "--server", "--compare")
LEVELS = ("debug", "info", "warning", "error", "critical")


class UsageError(ValueError):
    """A mistake on the command line, described in one line."""


def check_log_level(level: str) -> None:
    """Raises UsageError for a level that does not exist; empty is none given."""
    if level and level.lower() not in LEVELS:
        raise UsageError(
            f"--log-level takes {', '.join(LEVELS)}; got {level!r}{near(level, LEVELS)}"
        )


class Command(TyperCommand):
    """A command that reports an unknown option with a suggestion."""

    foreign: Mapping[str, str] = MappingProxyType({})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's Context, or typer's
        try:
            return super().parse_args(ctx, list(args))
        except Exception as error:
            unknown = getattr(error, "option_name", None)
            if unknown is None or not hasattr(error, "possibilities"):
                raise
            ours = {name for param in self.params for name in param.opts}
            raise UsageError(describe_unknown(unknown, args, ours, self.foreign)) from None


class ServeCommand(Command):
    """`foretoken serve`, which translates the options of other servers."""

    foreign = FOREIGN


class ManyCommand(Command):
    """Lets `--train a b c` stand for `--train a --train b --train c`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's Context, or typer's
        return super().parse_args(ctx, repeat_options(args))


def repeat_options(args: Sequence[str]) -> list[str]:
    """Repeats a many-valued option before each of its further values."""
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


def describe_unknown(
    unknown: str, args: Sequence[str], ours: Iterable[str], foreign: Mapping[str, str]
) -> str:
    """Describes an unknown option: translates all foreign options in `args`, else suggests one."""
    ours = set(ours)
    named = dict.fromkeys(arg.partition("=")[0] for arg in args if arg.startswith("-"))
    theirs = [name for name in named if name in foreign and name not in ours]
    if unknown in theirs or any(name.startswith(unknown) for name in theirs):
        return "; ".join(_translate(name, foreign[name]) for name in theirs)
    hint = near(unknown, ours) or "; --help lists all options"
    return f"unknown option {unknown}{hint}"


def _translate(name: str, ours: str) -> str:
    return f"{name}: use {ours}" if ours.startswith("-") else f"{name} {ours}"


def near(word: str, known: Iterable[str]) -> str:
    """Returns `, did you mean …?` if a known word is similar, else an empty string."""
    close = get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


@dataclass(frozen=True)
class Conflict:
    """Two options, by their parameters' names, of which a command takes one, and the reason."""

    one: str
    other: str
    reason: str


def given_options(context: Any) -> set[str]:
    """The names of the parameters that the command line sets. `context` is typer's."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def refuse_conflicts(given: set[str], conflicts: Iterable[Conflict]) -> None:
    """Raises UsageError for the first two given options that exclude each other."""
    for conflict in conflicts:
        if {conflict.one, conflict.other} <= given:
            raise UsageError(
                f"give either --{conflict.one} or --{conflict.other}: {conflict.reason}"
            )


def check_outputs(*files: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Checks before the work starts that each output file can be written, and that it is neither an
    input nor another output. Raises UsageError."""
    taken = {file.resolve(): "an input" for file in inputs if file and file.is_file()}
    for file in filter(None, files):
        folder = file.parent
        if not folder.is_dir():
            raise UsageError(f"cannot write {file}: the folder {folder} does not exist; create it")
        if file.is_dir():
            raise UsageError(f"cannot write {file}: it is a folder; name a file in it")
        if not os.access(file if file.exists() else folder, os.W_OK):
            raise UsageError(f"cannot write {file}: permission denied")
        if (use := taken.get(file.resolve())) and not file.is_char_device():
            raise UsageError(f"cannot write {file}: it is also {use}; name another file")
        taken[file.resolve()] = "another output"


def check_plot_folder(folder: Path | None) -> None:
    """Checks before the work starts that plots can be written to a folder. Raises UsageError."""
    if folder and folder.is_file():
        raise UsageError(f"--plot: {folder} is a file; name a folder")
    if folder and not folder.is_dir():
        raise UsageError(f"--plot: the folder does not exist; create it (got '{folder}')")
    if folder and not os.access(folder, os.W_OK):
        raise UsageError(f"--plot: cannot write to the folder {folder}: permission denied")
