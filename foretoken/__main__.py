"""The command `foretoken`; `python -m foretoken` is the same.

What a command needs is imported when it runs: a mistyped option is answered at once.
"""

import os
import sys
from typing import Annotated, NoReturn

from foretoken.running.interrupts import quiet_interrupts

if sys.argv[1:2] == ["serve"]:
    quiet_interrupts()  # until there is something to be ended in order

import typer

from foretoken.commands.bench import bench
from foretoken.commands.chat import chat
from foretoken.commands.evaluate import evaluate
from foretoken.commands.key import key
from foretoken.commands.presets import presets
from foretoken.commands.serve_command import serve
from foretoken.commands.train import app as train
from foretoken.commands.usage import Command, ManyCommand, ServeCommand, UsageError
from foretoken.commands.why import why

SERVE, ASK, LEARN = "Serve", "Ask a server", "Predictors"
MISTAKE = 2
CONTEXT = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="foretoken",
    help="SLA-aware LLM serving that schedules by foresight.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def _version(asked: bool) -> None:
    if asked:
        from services.runtime.version import foretoken_version

        print(f"foretoken {foretoken_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """SLA-aware LLM serving that schedules by foresight."""
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command(cls=ServeCommand, rich_help_panel=SERVE)(serve)
app.command(cls=Command, rich_help_panel=SERVE)(presets)
app.command(cls=Command, rich_help_panel=SERVE)(key)
app.command(cls=Command, rich_help_panel=ASK)(chat)
app.command(cls=ManyCommand, rich_help_panel=ASK)(bench)
app.command(cls=Command, rich_help_panel=ASK)(why)
app.command(cls=ManyCommand, rich_help_panel=LEARN)(evaluate)
app.add_typer(train, name="train", rich_help_panel=LEARN)


def main() -> None:
    """Run the command; a mistake of the user's is one line and status 2."""
    # gRPC's core would otherwise remark on every process we start. Read when it is first imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "4")  # seconds; a hub that is away is soon known
    try:
        status = app(prog_name="foretoken", standalone_mode=False)
    except UsageError as error:
        _complain(str(error))
    except (ValueError, ExceptionGroup) as error:
        from services.runtime.main import leave

        leave("foretoken", error)
    except Exception as error:
        # What the parser of the command line found; its classes have no public name.
        if not hasattr(error, "format_message"):
            raise
        if said := " ".join(error.format_message().split()):  # nothing: help was shown instead
            _complain(said)
        sys.exit(MISTAKE)
    sys.exit(status if isinstance(status, int) else 0)


def _complain(what: str) -> NoReturn:
    print(f"foretoken: {what}", file=sys.stderr)
    sys.exit(MISTAKE)


if __name__ == "__main__":
    main()
