"""Builds options of the commands, and options that several commands share."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from foretoken.client.address import API_KEY_VARIABLE

MakeOption = Callable[..., Any]  # typer's own class of options is not public


def option_maker(panel: str) -> MakeOption:
    """Returns a function that makes the options of one panel of `--help`."""

    def make_option(
        help_text: str,
        metavar: str = "",
        default: str | bool = True,
        names: Sequence[str] = (),
        **more: Any,
    ) -> Any:
        """Makes an option. `default` is what `--help` shows as the default; True: the value itself.

        `more` are further arguments of `typer.Option`, such as bounds.
        """
        return typer.Option(
            *names,
            help=help_text,
            metavar=metavar or None,
            show_default=default,
            rich_help_panel=panel,
            **more,
        )

    return make_option


ServerOption = Annotated[
    str,
    typer.Option(
        "--server",
        metavar="ADDRESS",
        help="http://host:port, grpc://host:port, unix:/path or host:port.",
    ),
]
ApiKeyOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar=API_KEY_VARIABLE,
        metavar="KEY",
        help="API key, if the server requires one.",
        show_default="none",
    ),
]


def describe_failure(error: Exception) -> str:
    """Returns the message of an error; for a rejected API key also what to set."""
    from foretoken.client.errors import Unauthenticated

    hint = f" Set --api-key or {API_KEY_VARIABLE}." if isinstance(error, Unauthenticated) else ""
    return f"{error}{hint}"
