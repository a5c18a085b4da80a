"""`foretoken certs`: makes certificates for the services of a deployment."""

from pathlib import Path
from typing import Annotated

import typer

from foretoken.commands.options import option_maker
from foretoken.commands.usage import UsageError

_option = option_maker("Certificates")


def certs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the files.")],
    days: Annotated[
        int, _option("Days until the certificates expire.", "N", min=1, max=3_650)
    ] = 90,
    host: Annotated[
        list[str] | None,
        _option("Host name or IP address that workers announce, or *.DOMAIN. Repeatable.", "HOST"),
    ] = None,
    more: Annotated[
        list[str] | None,
        _option(
            "One more certificate of a role, for one of several services: outcomes are stored with "
            "this name of their scheduler. Repeatable.",
            "ROLE-NAME",
        ),
    ] = None,
) -> None:
    """Make a certificate of each service, by an authority of this deployment.

    A service needs tls.cert=DIR/ROLE.pem, tls.key=DIR/ROLE.key and tls.ca=DIR/ca.pem; ROLE is `all`
    for `foretoken serve --separate`. Run the command again before they expire, with
    the same options: services read changed files again. ca.key can make a certificate of any role;
    no service needs it.
    """
    from foretoken.running.certificates import make_certificates

    try:
        names = make_certificates(folder, days, host or (), more or ())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot make certificates in {folder}: {error}") from None
    print(f"{folder}: ca.pem, and .pem and .key of {', '.join(names)}; expire in {days} days")
