"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

API_KEY = "TANDEM_API_KEY"
TokenFile = Annotated[
    Path | None, typer.Option(envvar="TANDEM_TOKEN_FILE", help="File with the token that the gateway asks for.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=API_KEY, help="Bearer token that every call must carry; the variable, since others see a command line."
    ),
]
TlsCa = Annotated[
    Path | None, typer.Option(envvar="TANDEM_TLS_CA", help="Speaks TLS; who signed the gateway's certificate, PEM.")
]
TlsCert = Annotated[Path | None, typer.Option(envvar="TANDEM_TLS_CERT", help="Own certificate, for mutual TLS.")]
TlsKey = Annotated[Path | None, typer.Option(envvar="TANDEM_TLS_KEY", help="Its key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
