"""Options that several commands have."""

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tandem.cluster.client.client import Client

API_KEY = "TANDEM_API_KEY"
Address = Annotated[
    str | None,
    typer.Option(help="Calls the gateway at HOST:PORT, or several with commas. Default: the running cluster."),
]
TokenFile = Annotated[
    Path | None, typer.Option(envvar="TANDEM_TOKEN_FILE", help="Reads the gateway's token from this file.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=API_KEY, help="Asks every call for this bearer token. Others see a command line: prefer the variable."
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(envvar="TANDEM_TLS_CA", help="Speaks TLS, and trusts this certificate (PEM)."),
]
TlsCert = Annotated[Path | None, typer.Option(envvar="TANDEM_TLS_CERT", help="Shows this certificate (PEM).")]
TlsKey = Annotated[Path | None, typer.Option(envvar="TANDEM_TLS_KEY", help="Reads the key of --tls-cert (PEM).")]
AsJson = Annotated[bool, typer.Option("--json", help="Prints JSON.")]


@dataclass(frozen=True)
class Gateway:
    """The gateway that a command calls. Its fields are the command's options, see calls_gateway."""

    address: Address = None
    token_file: TokenFile = None
    tls_ca: TlsCa = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None

    def open(self, address: str | None = None) -> "Client":
        """Returns a client of the gateway, or of this machine's cluster. Raises UsageError, ConfigError.

        address: calls this one instead; several may have commas between them, see Client. The token is token_file's,
        else TANDEM_API_KEY's.
        """
        from tandem.cluster.cli.input import running_address
        from tandem.cluster.client.client import Client
        from tandem.cluster.credentials import ClientSecurity, read_token

        paths = (None if path is None else str(path) for path in (self.tls_ca, self.tls_cert, self.tls_key))
        key = os.environ.get(API_KEY) or None
        token = key if self.token_file is None else read_token(self.token_file, "--token-file")
        return Client(address or self.address or running_address(), ClientSecurity(token, *paths))


def calls_gateway(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of Gateway, in the place of its keyword parameter `gateway`."""
    shared = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in inspect.signature(Gateway).parameters.values()
    ]

    @functools.wraps(command)
    def called(**options: object) -> None:
        given = {one.name: options.pop(one.name) for one in shared}
        command(**options, gateway=Gateway(**given))  # type: ignore[arg-type]  # typer has checked their types

    signature = inspect.signature(command)
    own = [part for one in signature.parameters.values() for part in (shared if one.name == "gateway" else [one])]
    called.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]  # typer reads it
    called.__annotations__ = {one.name: one.annotation for one in own} | {"return": None}
    return called
