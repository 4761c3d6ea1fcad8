"""The `tandem` command. Exit codes: 2 for bad usage or configuration, 1 for failures, one line on stderr for each.

Everything heavy is imported by the command that needs it, so that `tandem --help` is quick.
"""

import io
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tandem import __version__
from tandem.cache.kernels.build.build_once import KERNEL_CACHE
from tandem.cluster.cli.adapters.commands import app as adapter_app
from tandem.cluster.cli.batch.command import batch
from tandem.cluster.cli.bench import app as bench_app
from tandem.cluster.cli.doctor.command import doctor
from tandem.cluster.cli.embedding.command import embed
from tandem.cluster.cli.keys.commands import app as key_app
from tandem.cluster.cli.options import ApiKey, AsJson, Gateway, calls_gateway
from tandem.cluster.cli.replay import replay
from tandem.cluster.cli.vllm_flags import check_words
from tandem.cluster.errors import (
    ClusterNotRunning,
    ConfigError,
    InvalidRequest,
    StopTimedOut,
    TandemError,
    UsageError,
)
from tandem.cluster.tools.architectures import ARCHITECTURES, MTP_FIELDS
from tandem.proto.sampling import Sampling
from tandem.workers.checkpoint.errors import ModelError

app = typer.Typer(
    help="Serves large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(adapter_app, name="adapter")
app.add_typer(key_app, name="key")
app.command()(batch)
app.command()(doctor)
app.command()(embed)
if TYPE_CHECKING:
    Family = str
else:
    Family = Literal[(*ARCHITECTURES,)]
OWN_FLAGS = ("--api-key",)  # which `up` has, as `vllm serve` does


def _print_version(asked: bool) -> None:
    if asked:
        print(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print tandem's version and exit.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line (sys.argv when None) and exits."""
    if sys.stdout is None:  # closed, as by `>&-`
        sys.exit("tandem: stdout is closed; it must be open")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what the terminal's encoding lacks
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        check_words(words, OWN_FLAGS)
        app(args=words, prog_name="tandem")
    except (TandemError, ModelError) as error:
        for line in str(error).splitlines():
            print(f"tandem: {line}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError | ConfigError | InvalidRequest) else 1)


@app.command()
def up(
    config: Annotated[Path, typer.Argument(help="Reads the cluster's YAML; deploy/ has examples.")],
    model: Annotated[str | None, typer.Option(help="Serves this checkpoint folder or hub id. Sets model.path.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Sets gateway.port; 0 takes a free one.")] = None,
    http_port: Annotated[
        int | None,
        typer.Option(help="Serves OpenAI's API on this port; 0 takes a free one."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Sets a key, such as cache.page_size=32. Repeatable."),
    ] = None,
    verify_kv: Annotated[
        bool,
        typer.Option("--verify-kv", help="Sets island.verify_kv, which compares KV after each push."),
    ] = False,
    address: Annotated[str | None, typer.Option(help="Joins the Ray at HOST:PORT instead of starting one.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Takes over from the running cluster of that name, which then ends.")
    ] = False,
    api_key: ApiKey = None,
) -> None:
    """Start a cluster, and stay until Ctrl-C or SIGTERM.

    It prints `ready grpc=HOST:PORT` once requests can come. A variable sets a key, too: TANDEM_GATEWAY__PORT is
    gateway.port. An option overrides a variable, and a variable the YAML.
    """
    from tandem.cluster.cli.preflight import as_typed, require_model
    from tandem.cluster.config.cluster_config import load_config
    from tandem.cluster.config.file import parse_override

    given: dict[str, Any] = {"model.path": model, "security.api_key": api_key, "island.verify_kv": verify_kv or None}
    given |= {"gateway.port": grpc_port, "gateway.http_port": http_port}
    values = dict(map(parse_override, overrides or ()))
    values |= {key: value for key, value in given.items() if value is not None}
    loaded = load_config(config, values, os.environ)
    require_model(loaded)

    from tandem.cluster.processes.ray_access import token_shown

    with token_shown(), as_typed(values.get("model.path"), loaded.model.path):
        from tandem.cluster.cli.foreground import run_cluster

        run_cluster(loaded, address, replace=replace)


@app.command()
def down(
    name: Annotated[str | None, typer.Argument(help="Names the cluster. Not needed while only one runs.")] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Waits at most this many seconds for its end.")] = 60.0,
) -> None:
    """Stop a cluster that runs on this machine."""
    from tandem.cluster.cli.runtime_dir import running_cluster, running_clusters

    names = [state.name for state in running_clusters()]
    running = f"running: {', '.join(names) or 'none'}"
    if name is None and len(names) > 1:
        raise UsageError(f"give the name of one; {running}")
    name = name or next(iter(names), "local")
    state = running_cluster(name)
    if state is None:
        raise ClusterNotRunning(f"name is {name!r}: no such cluster runs here; {running}")
    if state.pid is None:
        raise StopTimedOut(f"cluster {name!r} is only just starting; try again")
    with suppress(ProcessLookupError):
        os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while (current := running_cluster(name)) is not None and current.pid == state.pid:
        if time.monotonic() > deadline:
            raise StopTimedOut(
                f"cluster {name!r} (pid {state.pid}) was asked to stop and still runs after {timeout:g} s"
            )
        time.sleep(0.05)
    print(f"stopped {name}")


@app.command()
@calls_gateway
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Gives the prompt; - or nothing reads it from stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Reads the prompt from a file.")] = None,
    token_ids: Annotated[str | None, typer.Option(help='Gives the prompt as token ids, such as "1,2,3".')] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Sends it as a user's message, by the chat template.")] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Generates at most this many tokens. Default: 16.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sets the temperature; 0 is greedy. Default: the model's.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Keeps the likeliest tokens up to this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keeps this many of the likeliest tokens.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Drops tokens below this fraction of the likeliest.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes the answer repeatable.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Generates this many answers. Default: 1.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Adds alternatives of each token, with --json.")] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="Adds alternatives of each prompt token, with --json.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the output at this text. Repeatable.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Ends the output at this token. Repeatable.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Goes on past the end token.")] = False,
    priority: Annotated[int | None, typer.Option(help="Serves it before those of higher numbers. Default: 0.")] = None,
    model: Annotated[
        str,
        typer.Option("--model", "--adapter", help="Names the LoRA adapter that answers. Default: the model itself."),
    ] = "",
    request_id: Annotated[str | None, typer.Option(help="Names the request. Default: a name of the gateway's.")] = None,
    cache_salt: Annotated[str, typer.Option(help="Shares cached prefixes only with requests of the same salt.")] = "",
    timeout: Annotated[float, typer.Option(min=0, help="Gives up after this many seconds.")] = 600.0,
    *,
    gateway: Gateway,
    as_json: AsJson = False,
) -> None:
    """Stream the answers to one prompt.

    With --json it prints their tokens and timings at the end instead.
    """
    options = locals()  # sampling options have the names of its fields
    given = {name: options[name] for name in Sampling.__annotations__ if name in options}
    sampling: dict[str, Any] = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
    sampling |= {"model": model} if model else {}

    from tandem.cluster.cli.input import in_own_words, read_prompt
    from tandem.cluster.cli.output import print_json, print_stream

    wanted = read_prompt(prompt, file, token_ids, chat=chat)
    with in_own_words(), gateway.open() as client:
        updates = client.generate(wanted, request_id=request_id, cache_salt=cache_salt, timeout=timeout, **sampling)
        (print_json if as_json else print_stream)(updates, max(1, n or 1))


@app.command()
@calls_gateway
def status(
    name: Annotated[str | None, typer.Argument(help="Names the cluster. Default: the one that runs.")] = None,
    *,
    gateway: Gateway,
    as_json: AsJson = False,
) -> None:
    """Show a cluster's workers, pages, requests and log folder."""
    from tandem.cluster.cli.input import address_of, logs_at, running_address
    from tandem.cluster.cli.output import print_cluster

    if name is not None and gateway.address is not None:
        raise UsageError("give NAME or --address, not both")
    there = gateway.address or (running_address() if name is None else address_of(name))
    with gateway.open(there) as client:
        print_cluster(client.cluster_info(), as_json)
    if not as_json and (logs := logs_at(there)):
        print(f"logs in {logs}")


@app.command()
@calls_gateway
def top(
    name: Annotated[str | None, typer.Argument(help="Names the cluster. Not needed while only one runs.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Shows it once, and exits.")] = False,
    interval: Annotated[
        float, typer.Option(min=0.5, max=3600, help="Waits this many seconds between two views.")
    ] = 1.0,
    *,
    gateway: Gateway,
    as_json: AsJson = False,
) -> None:
    """Watch a cluster's workers, queues, pages and latencies."""
    if name is not None and gateway.address is not None:
        raise UsageError("give NAME or --address, not both")

    from tandem.cluster.cli.input import address_of
    from tandem.cluster.cli.top import watch

    with gateway.open(None if name is None else address_of(name)) as client:
        watch(client, interval, once=once, as_json=as_json)


@app.command()
@calls_gateway
def trace(
    request_id: Annotated[str, typer.Argument(help="Names the request, by its id or its client's X-Request-Id.")],
    output: Annotated[Path | None, typer.Option(help="Writes this file. Default: stdout.")] = None,
    *,
    gateway: Gateway,
) -> None:
    """Write a finished request's timeline as Chrome trace JSON.

    Perfetto shows it. The cluster must have tracing.keep.
    """
    from tandem.cluster.cli.trace import chrome_trace

    with gateway.open() as client:
        answer = client.trace(request_id)
    if not answer.HasField("trace"):
        raise TandemError(f"request_id is {request_id!r:.160}; no gateway process keeps it (tracing.keep)")
    text = chrome_trace(answer.trace)
    try:
        print(text) if output is None else output.write_text(text)
    except OSError as error:
        raise TandemError(f"{output}: cannot be written: {error.strerror}") from None


@app.command()
@calls_gateway
def scale(
    prefill: Annotated[int | None, typer.Option(min=0, help="Changes the number of prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(min=1, help="Changes the number of decode workers.")] = None,
    island: Annotated[str, typer.Option(help="Names the island. Not needed where there is one.")] = "",
    islands: Annotated[int | None, typer.Option(min=1, help="Changes the number of islands, and nothing else.")] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Waits at most this many seconds for the new shape.")] = 600.0,
    *,
    gateway: Gateway,
    as_json: AsJson = False,
) -> None:
    """Change an island's workers or their roles, or the islands.

    Workers that stay keep their weights. New workers load first. Over TCP and NIXL the island serves on: workers that
    leave finish what they have within recovery.drain_seconds, and the rest moves to others. Elsewhere it takes no
    requests for a moment: what runs is finished in that time, or goes on afterwards where it was.
    """
    if prefill is None and decode is None and islands is None:
        raise UsageError("no number is given: give --prefill, --decode or both, or --islands")

    from tandem.cluster.cli.output import print_scaled

    with gateway.open() as client:
        print_scaled(
            client.scale(island, num_prefill=prefill, num_decode=decode, num_islands=islands, timeout=timeout), as_json
        )


@app.command()
def make_model(
    folder: Annotated[Path, typer.Argument(help="Writes the checkpoint to this folder, which is new or empty.")],
    arch: Annotated[
        Family, typer.Option(metavar="FAMILY", help=f"Chooses the model's family: {', '.join(ARCHITECTURES)}.")
    ] = "llama",
    size: Annotated[
        Literal["tiny", "small"], typer.Option(help="Makes 2 layers of width 64, or 4 of width 256.")
    ] = "tiny",
    seed: Annotated[int, typer.Option(min=0, help="Seeds the random weights.")] = 0,
    mtp: Annotated[bool, typer.Option("--mtp", help="Adds a layer for multi-token prediction.")] = False,
) -> None:
    """Write a checkpoint of random weights, with a tokenizer."""
    try:
        if folder.exists() and any(folder.iterdir()):  # perhaps a checkpoint that somebody needs
            raise UsageError(f"{folder} is not empty; it must be a new or an empty folder")
        if mtp and arch not in MTP_FIELDS:
            raise UsageError(f"--mtp is given with --arch {arch}; --arch must be one of {', '.join(MTP_FIELDS)}")
        from tandem.cluster.tools.random_checkpoint import make_checkpoint

        make_checkpoint(folder, arch=arch, size=size, seed=seed, mtp=mtp)
    except OSError as error:
        raise TandemError(f"{folder}: cannot be written: {error.strerror}") from None
    print(f"wrote {folder}")


@app.command()
def build_kernels(
    config: Annotated[Path, typer.Argument(help="Reads the cluster's YAML.")],
    model: Annotated[str | None, typer.Option(help="Serves this checkpoint folder or hub id. Sets model.path.")] = None,
    output: Annotated[
        Path | None, typer.Option(envvar=KERNEL_CACHE, help="Writes to this folder. Default: ~/.cache/tandem.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Compiles for this GPU, such as h200. Default: this host's.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Sets a key, such as cache.page_size=32. Repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prints what is missing and builds nothing.")] = False,
) -> None:
    """Compile what a model needs ahead of its first start.

    Compilers run side by side within this host's memory. TANDEM_KERNEL_CACHE=FOLDER lets `tandem up` use the folder, on
    this host and on hosts of the same kind.
    """
    from tandem.cluster.cli.kernels.prebuild import prebuild
    from tandem.cluster.config.cluster_config import load_config
    from tandem.cluster.config.file import parse_override

    values = dict(map(parse_override, overrides or ())) | ({} if model is None else {"model.path": model})
    prebuild(load_config(config, values, os.environ), output, gpu, dry_run=dry_run)


app.command()(replay)


@app.command()
def version() -> None:
    """Print tandem's version."""
    print(f"tandem {__version__}")
