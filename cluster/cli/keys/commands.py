"""`tandem key`: keys of callers, in the file that security.keys_file names."""

import json
import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.cluster.cli.options import AsJson, Gateway, calls_gateway

if TYPE_CHECKING:
    from tandem.cluster.keys.key import Key

KEY = "tdm-"  # how every key begins, so that scanners of secrets find one
COUNTED = {  # by the words of `tandem key usage`
    "requests": "tandem:key_requests_total",
    "prompt_tokens": "tandem:key_prompt_tokens_total",
    "output_tokens": "tandem:key_output_tokens_total",
    "refused": "tandem:key_refused_total",
}
app = typer.Typer(help="Make, list, check and remove callers' keys.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Names the key: 1 to 64 letters, digits and . _ -.")]
KeyFile = Annotated[Path, typer.Argument(metavar="FILE", help="Reads this file of keys.")]


@app.command()
def new(
    name: Name,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Allows this many requests in any minute. Default: no limit.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Allows this many tokens of prompts and outputs in any minute. Default: no limit."),
    ] = None,
    models: Annotated[
        str | None, typer.Option(metavar="A,B", help="Allows these models and LoRA adapters. Default: all.")
    ] = None,
    priority: Annotated[
        str | None,
        typer.Option(metavar="LOWEST:HIGHEST", help="Allows priorities within these. Default: gateway.priorities."),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Adds the entry to this file, which may be new.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, and print it once.

    The file has its SHA-256 only, so a lost key cannot be read from there. Without --file the entry is printed, too.
    """
    from tandem.cluster.cli.keys.file_text import entry_text, with_entry
    from tandem.cluster.cli.keys.replaced_file import replace_file
    from tandem.cluster.keys.key import digest_of

    made = KEY + secrets.token_urlsafe(32)
    fields: dict[str, Any] = {"name": name, "sha256": digest_of(made).hex()}
    fields |= {"requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
    fields |= {"priority": _bounds(priority), "models": None if models is None else models.split(",")}
    with_entry("", fields, "the new key")  # refuses bad values, and names their field
    if file is not None:
        replace_file(file, lambda text: with_entry(text, fields, f"--file {file}"), makes=True)
    if as_json:
        print(json.dumps({"name": name, "key": made, "entry": {k: v for k, v in fields.items() if v is not None}}))
        return
    print(made)
    if file is None:
        print(entry_text(fields), end="")
    else:
        print(f"tandem: {file} has {name}; the key is printed only now", file=sys.stderr)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="Names the key.")],
    file: Annotated[Path, typer.Option(help="Removes it from this file.")],
) -> None:
    """Remove a key from a file.

    Gateways notice within a second. Its running requests end normally, and new ones are answered with 401.
    """
    from tandem.cluster.cli.keys.file_text import without_entry
    from tandem.cluster.cli.keys.replaced_file import replace_file

    replace_file(file, lambda text: without_entry(text, name, f"--file {file}"), makes=False)
    print(f"removed {name}")


@app.command()
def check(file: KeyFile) -> None:
    """Check a file of keys as a gateway would."""
    from tandem.cluster.keys.key_file import read_keys

    count = len(read_keys(file, "FILE"))
    print(f"{file} is right: {count} {'key' if count == 1 else 'keys'}")


@app.command("list")
def list_all(file: KeyFile, as_json: AsJson = False) -> None:
    """List the keys of a file, with their limits."""
    from tandem.cluster.keys.key_file import read_keys

    keys = read_keys(file, "FILE")
    if as_json:
        print(json.dumps([_values(key) for key in keys], indent=2))
        return
    for key in keys:
        bounds = "any" if key.priority is None else f"{key.priority.lowest} … {key.priority.highest}"
        models = "all" if key.models is None else ", ".join(sorted(key.models))
        print(
            f"{key.name}  requests a minute {_limit(key.requests_per_minute)}  tokens a minute "
            f"{_limit(key.tokens_per_minute)}  priorities {bounds}  models {models}  sha256 {key.sha256.hex()[:8]}…"
        )


@app.command()
@calls_gateway
def usage(*, gateway: Gateway, as_json: AsJson = False) -> None:
    """Show what each key has used since the cluster started.

    It asks one gateway with the operator's token. With gateways on several hosts it shows the numbers of its own host.
    """
    from tandem.cluster.cli.samples import Samples

    with gateway.open() as client:
        samples = Samples(client.metrics().text)
    names = sorted({labels["key"] for labels, _ in samples.series(COUNTED["requests"])})
    used = [
        {"name": name} | {word: int(samples.total(metric, key=name)) for word, metric in COUNTED.items()}
        for name in names
    ]
    if as_json:
        print(json.dumps(used, indent=2))
        return
    if not used:
        print("the gateway has no keys")
    for one in used:
        print(
            f"{one['name']}  requests {one['requests']:,}  prompt tokens {one['prompt_tokens']:,}  "
            f"output tokens {one['output_tokens']:,}  refused {one['refused']:,}"
        )


def _bounds(text: str | None) -> dict[str, int] | None:
    from tandem.cluster.errors import UsageError

    if text is None:
        return None
    found = re.fullmatch(r"(-?\d{1,10}):(-?\d{1,10})", text)
    if found is None:
        raise UsageError(f"--priority is {text!r:.80}; it must be two integers with a colon between, such as 0:10")
    return {"lowest": int(found[1]), "highest": int(found[2])}


def _values(key: "Key") -> dict[str, Any]:
    """Returns the key's values by the names that the file has."""
    bounds = None if key.priority is None else {"lowest": key.priority.lowest, "highest": key.priority.highest}
    limits = {"requests_per_minute": key.requests_per_minute, "tokens_per_minute": key.tokens_per_minute}
    models = None if key.models is None else sorted(key.models)
    return {"name": key.name, "sha256": key.sha256.hex(), **limits, "priority": bounds, "models": models}


def _limit(value: int | None) -> str:
    return "no limit" if value is None else f"{value:,}"
