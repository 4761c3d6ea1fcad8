"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

API_KEY = "TANDEM_API_KEY"
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
