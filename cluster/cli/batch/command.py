"""`tandem batch`."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cluster.cli.options import API_KEY, Gateway, TlsCa, TlsCert, TlsKey, TokenFile

if TYPE_CHECKING:
    from tandem.cluster.cli.batch.calls import Server
    from tandem.cluster.cli.batch.rows import Results

OPENAPI = "/openapi.json"
URLS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
IF_THERE = frozenset({"/v1/embeddings"})
LINE_SECONDS = 10.0  # between two lines of progress where no terminal shows a bar
ASK_SECONDS = 30.0


def batch(
    requests: Annotated[Path, typer.Argument(metavar="IN", help="Reads requests in OpenAI's batch format, JSONL.")],
    results: Annotated[Path, typer.Argument(metavar="OUT", help="Appends results. A file of an earlier run goes on.")],
    url: Annotated[
        str | None, typer.Option(help="Calls http://HOST:PORT. Default: the HTTP server of the cluster at --address.")
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, max=1024, help="Sends this many requests at a time.")] = 64,
    priority: Annotated[
        int | None, typer.Option(help="Gives rows without one this priority. Default: the gateway's last.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Waits this many seconds for one answer.")] = 3600.0,
    patience: Annotated[
        float, typer.Option(min=0, help="Stops when the gateway is away for this many seconds.")
    ] = 600.0,
    address: Annotated[
        str | None,
        typer.Option(help="Asks the gateway at HOST:PORT where its HTTP server is. Default: the running one."),
    ] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Answer a file of requests, at a low priority.

    Each result is one line of OUT, in the order in which they come. Run the command again after it was stopped, or
    killed: rows that have a result are not sent again. It exits with 1 when rows have ended with an error, or it
    stopped before its end.
    """
    from tandem.cluster.cli.batch.calls import Server, tls_context
    from tandem.cluster.cli.batch.rows import Results, Row, check_rows, read_rows
    from tandem.cluster.cli.batch.run import Batch, Limits
    from tandem.cluster.credentials import read_token
    from tandem.cluster.errors import UsageError

    if requests.exists() and results.exists() and requests.samefile(results):
        raise UsageError(f"IN and OUT are both {requests}; give another file for the results")
    token = read_token(token_file, "--token-file") if token_file is not None else os.environ.get(API_KEY) or None
    where = url or _http_of(address, token_file, tls_ca, tls_cert, tls_key)
    server = Server.of_url(where, token, tls_context(tls_ca, tls_cert, tls_key))
    urls = _served(server)
    ids = check_rows(requests, urls)
    kept = Results(results, ids)
    try:
        left = (row for row in read_rows(requests, urls) if isinstance(row, Row) and row.custom_id not in kept.done)
        running = Batch(server, Limits(in_flight, timeout, patience, priority), left, kept)
        with _Progress(len(ids), kept) as progress:
            running.run(progress.show)
    except KeyboardInterrupt:
        print(f"tandem: stopped; {len(ids) - len(kept.done)} rows are left: run it again", file=sys.stderr)
        raise typer.Exit(1) from None
    finally:
        kept.close()
    print(f"{len(kept.done)} rows in {results}, {kept.failed} with an error")
    if kept.failed:
        raise typer.Exit(1)


def _http_of(address: str | None, *files: Path | None) -> str:
    """Returns the URL of a gateway's HTTP server. Raises UsageError if it has none."""
    from tandem.cluster.cli.input import reachable
    from tandem.cluster.errors import UsageError

    with Gateway(address, *files).open() as client:
        found = client.cluster_info().http_address
    if not found:
        raise UsageError("the cluster has no HTTP server; set gateway.http_port, or give --url")
    return f"{'http' if files[1] is None else 'https'}://{reachable(found)}"


def _served(server: "Server") -> frozenset[str]:
    """Returns the paths that rows may name: OpenAI's three ways to generate, and embeddings if the gateway has them."""
    from tandem.cluster.cli.batch.calls import Connection
    from tandem.cluster.errors import TandemError

    connection = Connection(server, ASK_SECONDS)
    try:
        answer = connection.call("GET", OPENAPI)
    except OSError as error:
        raise TandemError(f"{server.host}:{server.port}: {error}") from None
    finally:
        connection.close()
    if answer.status == 401:
        raise TandemError("the gateway asks for another token: TANDEM_API_KEY, or --token-file")
    paths = answer.value.get("paths", {}) if answer.status == 200 and isinstance(answer.value, dict) else {}
    return URLS | (IF_THERE & paths.keys())


class _Progress:
    """A bar on a terminal, else a line each LINE_SECONDS, on stderr."""

    def __init__(self, total: int, results: "Results") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._total = total
        self._results = results
        self._said = 0.0
        console = Console(stderr=True)
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[failed]} failed"), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total, completed=len(results.done), failed=results.failed)

    def __enter__(self) -> "_Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self) -> None:
        done, failed = len(self._results.done), self._results.failed
        if self._bar is not None:
            self._bar.update(self._task, completed=done, failed=failed)
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            print(f"tandem: {done} of {self._total} rows, {failed} with an error", file=sys.stderr, flush=True)
