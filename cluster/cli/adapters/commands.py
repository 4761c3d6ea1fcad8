"""`tandem adapter`: LoRA adapters of a running cluster."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from tandem.cluster.cli.options import AsJson, Gateway, calls_gateway
from tandem.proto import admin_pb2

app = typer.Typer(help="Add, remove and list LoRA adapters of a running cluster.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="Names the adapter: requests give it as their model.")]


@app.command()
@calls_gateway
def add(
    name: Name,
    path: Annotated[Path, typer.Argument(help="Reads this PEFT folder, on the hosts of the gateway and the workers.")],
    load_inplace: Annotated[
        bool, typer.Option("--load-inplace", help="Takes the place of other weights of that name.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Waits at most this many seconds.")] = 120.0,
    *,
    gateway: Gateway,
    as_json: AsJson = False,
) -> None:
    """Load an adapter at all workers, and serve it.

    Where a worker cannot load it, none keeps it. The folder must be one of adapters.folders, or under
    adapters.allowed_root.
    """
    with gateway.open() as client:
        folder = str(path.expanduser().absolute())
        _print([client.add_adapter(name, folder, load_inplace=load_inplace, timeout=timeout)], as_json=as_json)


@app.command()
@calls_gateway
def remove(
    name: Name,
    timeout: Annotated[float, typer.Option(min=0, help="Waits at most this many seconds.")] = 60.0,
    *,
    gateway: Gateway,
) -> None:
    """Refuse new requests that name an adapter.

    Running requests end normally.
    """
    with gateway.open() as client:
        removed = client.remove_adapter(name, timeout=timeout)
    print(f"removed {removed.name}")


@app.command("list")
@calls_gateway
def list_all(
    *,
    gateway: Gateway,
    as_json: AsJson = False,
) -> None:
    """List the adapters that are served."""
    with gateway.open() as client:
        _print(client.adapters().adapters, as_json=as_json)


def _print(adapters: Iterable[admin_pb2.ServedAdapter], *, as_json: bool) -> None:
    """Prints a line for each adapter, or a JSON list."""
    if as_json:
        print(json.dumps([_values(one) for one in adapters], indent=2))
        return
    for one in adapters:
        print(
            f"{one.name}  rank {one.rank}  {one.bytes / (1 << 20):.1f} MiB  held by {one.holding} of {one.workers} "
            f"workers, resident at {one.resident}  digest {one.digest.hex()}  {one.path}"
        )


def _values(one: admin_pb2.ServedAdapter) -> Mapping[str, object]:
    values = {field.name: getattr(one, field.name) for field in one.DESCRIPTOR.fields}
    return values | {"digest": one.digest.hex()}
