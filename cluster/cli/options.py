"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

TokenFile = Annotated[
    Path | None, typer.Option(envvar="TANDEM_TOKEN_FILE", help="File with the token that the gateway asks for.")
]
TlsCa = Annotated[
    Path | None, typer.Option(envvar="TANDEM_TLS_CA", help="Speaks TLS; who signed the gateway's certificate, PEM.")
]
TlsCert = Annotated[Path | None, typer.Option(envvar="TANDEM_TLS_CERT", help="Own certificate, for mutual TLS.")]
TlsKey = Annotated[Path | None, typer.Option(envvar="TANDEM_TLS_KEY", help="Its key.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
