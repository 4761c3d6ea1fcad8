"""`tandem embed`."""

import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tandem.cluster.cli.options import Gateway, calls_gateway

if TYPE_CHECKING:
    from tandem.cluster.client.client import Client

NAMED = re.compile(r"(\w+) (?:is|has|are) ")  # how the gateway's errors about a field begin


@calls_gateway
def embed(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TEXT]...", help="Gives the texts; - or nothing reads one from each line of stdin."),
    ] = None,
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keeps this many numbers. Default: all.")] = None,
    normalize: Annotated[
        bool | None, typer.Option("--normalize/--no-normalize", help="Scales to length 1. Default: the checkpoint's.")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="Puts the checkpoint's prompt of this name before each text.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Puts this text before each text.")] = None,
    truncate_prompt_tokens: Annotated[
        int | None, typer.Option(min=-1, help="Keeps this many tokens of a text; -1 keeps as many as fit.")
    ] = None,
    priority: Annotated[int | None, typer.Option(help="Serves it before those of higher numbers. Default: 0.")] = None,
    cache_salt: Annotated[str, typer.Option(help="Shares cached prefixes only with requests of the same salt.")] = "",
    batch: Annotated[int, typer.Option(min=1, max=2048, help="Sends this many texts in a call.")] = 64,
    timeout: Annotated[float, typer.Option(min=0, help="Waits at most this many seconds for a call.")] = 600.0,
    *,
    gateway: Gateway,
) -> None:
    """Print the embeddings of texts as JSON lines.

    A line has the index of its text and its embedding, in the order of the texts. Lines of stdin are sent while more
    are read.
    """
    given = {"dimensions": dimensions, "normalize": normalize, "prompt_name": prompt_name, "prompt": prompt}
    given |= {"truncate_prompt_tokens": truncate_prompt_tokens, "priority": priority}
    options = {name: value for name, value in given.items() if value is not None}
    lines = _lines() if texts in (None, [], ["-"]) else iter(texts or ())
    with gateway.open() as client:
        first = 0
        while part := list(itertools.islice(lines, batch)):
            _print(first, _embedded(client, first, part, {**options, "cache_salt": cache_salt, "timeout": timeout}))
            first += len(part)
    if not first:
        _none()


def _embedded(client: "Client", first: int, texts: Sequence[str], options: dict[str, Any]) -> Iterable[list[float]]:
    """Makes one call. first: the index of its first text. A refusal names the command's options and these texts."""
    from tandem.cluster.errors import InvalidRequest

    try:
        return client.embed(texts, **options).values.tolist()
    except InvalidRequest as error:
        said = str(error)
        field = NAMED.match(said)
        if field is not None and field[1] in options:
            said = f"--{field[1].replace('_', '-')}{said[field.end(1) :]}"
        where = f"texts {first} … {first + len(texts) - 1}: " if first else ""
        raise InvalidRequest(f"{where}{said}") from None


def _print(first: int, rows: Iterable[list[float]]) -> None:
    for index, row in enumerate(rows, start=first):
        print(json.dumps({"index": index, "embedding": row}))
    sys.stdout.flush()


def _lines() -> Iterator[str]:
    from tandem.cluster.errors import UsageError

    if sys.stdin is None or sys.stdin.isatty():
        _none()
    try:
        yield from (line.rstrip("\r\n") for line in sys.stdin)
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin: {error}") from None


def _none() -> NoReturn:
    from tandem.cluster.errors import UsageError

    raise UsageError("no text: give texts as arguments, or one on each line of stdin")
