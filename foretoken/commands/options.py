"""Options that several commands share, so that they are spelled alike."""

from typing import Annotated

import typer

from foretoken.client.address import API_KEY_VARIABLE

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
