"""The `foretoken` command; `python -m foretoken` runs it, too.

Each command imports what it needs when it runs, so that a mistyped option is reported at once.
"""

import os
import sys
from typing import Annotated, NoReturn

from foretoken.running.interrupts import quiet_interrupts

if sys.argv[1:2] == ["serve"]:
    quiet_interrupts()  # until there is something to clean up

import typer

from foretoken.commands.bench import bench
from foretoken.commands.certs import certs
from foretoken.commands.chat import chat
from foretoken.commands.epp import epp
from foretoken.commands.key import key
from foretoken.commands.offline.calibrate import calibrate
from foretoken.commands.offline.evaluate import evaluate
from foretoken.commands.offline.generate import generate
from foretoken.commands.offline.outcomes import outcomes
from foretoken.commands.offline.plan import plan
from foretoken.commands.offline.record import record
from foretoken.commands.offline.reproduce import reproduce
from foretoken.commands.offline.simulate import simulate
from foretoken.commands.offline.train import app as train
from foretoken.commands.offline.tune import tune
from foretoken.commands.offline.twin import twin
from foretoken.commands.presets import presets
from foretoken.commands.serve import serve
from foretoken.commands.tokens import tokens
from foretoken.commands.usage import Command, ManyCommand, ServeCommand, UsageError
from foretoken.commands.why import why

SERVE, CLIENT, SIMULATOR, LAB = "Serve", "Use a server", "Simulate", "Predictors"
USAGE_ERROR = 2
CONTEXT = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="foretoken",
    help="SLA-aware LLM serving that schedules by forecast.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT,
)


def _version(requested: bool) -> None:
    if requested:
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
    """SLA-aware LLM serving that schedules by forecast."""
    if context.invoked_subcommand is None:
        print(context.get_help())


app.command(cls=ServeCommand, rich_help_panel=SERVE)(serve)
app.command(cls=Command, rich_help_panel=SERVE)(generate)
app.command(cls=Command, rich_help_panel=SERVE)(epp)
app.command(cls=Command, rich_help_panel=SERVE)(presets)
app.command(cls=Command, rich_help_panel=SERVE)(key)
app.command(cls=Command, rich_help_panel=SERVE)(certs)
app.command(cls=Command, rich_help_panel=SERVE)(outcomes)
app.command(cls=Command, rich_help_panel=SERVE)(tokens)
app.command(cls=Command, rich_help_panel=CLIENT)(chat)
app.command(cls=ManyCommand, rich_help_panel=CLIENT)(bench)
app.command(cls=Command, rich_help_panel=CLIENT)(why)
app.command(cls=Command, rich_help_panel=SIMULATOR)(simulate)
app.command(cls=Command, rich_help_panel=SIMULATOR)(plan)
app.command(cls=Command, rich_help_panel=SIMULATOR)(tune)
app.command(cls=Command, rich_help_panel=SIMULATOR)(record)
app.command(cls=Command, rich_help_panel=SIMULATOR)(reproduce)
app.command(cls=Command, rich_help_panel=SIMULATOR)(calibrate)
app.command(cls=Command, rich_help_panel=SIMULATOR)(twin)
app.command(cls=ManyCommand, rich_help_panel=LAB)(evaluate)
app.add_typer(train, name="train", rich_help_panel=LAB)


def main() -> None:
    """Runs the command; a usage error is one line and status 2."""
    # gRPC logs a warning for every child process otherwise. Read when gRPC is first imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "4")  # fail soon without a hub
    try:
        status = app(prog_name="foretoken", standalone_mode=False)
    except UsageError as error:
        _exit_with_usage_error(str(error))
    except (ValueError, ExceptionGroup) as error:
        from services.runtime.main import exit_with_error

        exit_with_error("foretoken", error)
    except Exception as error:
        # An error of the command line parser. Its classes are not public.
        if not hasattr(error, "format_message"):
            raise
        if message := " ".join(error.format_message().split()):  # empty: help was printed
            _exit_with_usage_error(message)
        sys.exit(USAGE_ERROR)
    sys.exit(status if isinstance(status, int) else 0)


def _exit_with_usage_error(message: str) -> NoReturn:
    print(f"foretoken: {message}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
