"""`tandem bench` and its commands. What they need is imported by the one that runs."""

import asyncio
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.core import TyperGroup

from tandem.cluster.cli.options import AsJson, TlsCa, TlsCert, TlsKey, TokenFile

BENCH_FOLDER = Path("build", "bench")
DEFAULT = "run"


class BenchGroup(TyperGroup):
    """Runs the benchmarks of a checkout where no command is named: `tandem bench NAMES`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # click's own
        if not args or args[0] not in (*self.commands, "--help"):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=BenchGroup,
    help="Run a checkout's benchmarks, or load a server.",
    rich_markup_mode=None,
)


@app.command(DEFAULT)
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Runs these. Default: all.")] = None,
    out: Annotated[Path, typer.Option(help="Writes NAME.json and plots to this folder.")] = BENCH_FOLDER,
    only_list: Annotated[bool, typer.Option("--list", help="Lists the benchmarks, and runs none.")] = False,
) -> None:
    """Run the benchmarks of the checkout around the current folder.

    Each writes its numbers as JSON, and plots, and prints its targets. The exit code is 1 when one fails. A missed
    target is no failure.
    """
    from tandem.cluster.tools.bench.checkout import load_benchmarks

    benchmarks = load_benchmarks()
    if only_list:
        benchmarks.list_benchmarks(names or [])
    else:
        benchmarks.run_benchmarks(names or [], out)


@app.command()
def serve(
    grpc: Annotated[str | None, typer.Option(help="Loads the tandem gateway at HOST:PORT.")] = None,
    url: Annotated[
        list[str] | None,
        typer.Option(help="Loads a server with OpenAI's API, such as http://127.0.0.1:8000. Several take turns."),
    ] = None,
    endpoint: Annotated[
        Literal["completions", "chat"], typer.Option(help="Sends prompts as token ids, or chats as text, with --url.")
    ] = "completions",
    model_name: Annotated[
        str | None, typer.Option(help="Names the served model. Default with --url: the first one.")
    ] = None,
    mix: Annotated[
        str | None, typer.Option(help="Sets lengths, arrivals and SLO: A, A2, B, C, bursty, mixed or laptop.")
    ] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            help="Draws prompt lengths instead of the mix's: fixed:N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA:CAP or "
            "either:LOW:HIGH:SHARE."
        ),
    ] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Draws output lengths in the same way.")] = None,
    prefix: Annotated[
        int, typer.Option(min=0, help="Begins prompts with a shared system prompt of this many tokens.")
    ] = 0,
    prefixes: Annotated[int, typer.Option(min=1, help="Uses this many different system prompts.")] = 1,
    turns: Annotated[
        int, typer.Option(min=1, max=100, help="Sends chats of this many turns, each with its history.")
    ] = 1,
    pause_seconds: Annotated[
        float, typer.Option(min=0, help="Waits this many seconds, on average, before the next turn.")
    ] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="Replays requests in Mooncake's JSONL format.")] = None,
    rate: Annotated[
        list[float] | None,
        typer.Option(help="Sends this many requests a second. Repeatable. Default: the trace's own."),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Searches for the goodput from --rate on. Default without --rate."),
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Measures arrivals for this many seconds at each --rate.")
    ] = 30.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Measures this many requests instead of --seconds.")
    ] = None,
    warmup_seconds: Annotated[
        float, typer.Option(min=0, help="Sends requests for this many seconds before it measures.")
    ] = 3.0,
    tail_seconds: Annotated[float, typer.Option(min=0, help="Sends requests for this many seconds after that.")] = 5.0,
    burstiness: Annotated[
        float | None,
        typer.Option(help="Shapes arrivals: 1 Poisson, less bursty, inf even. Default: the mix's."),
    ] = None,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(min=0, help="Allows this long until the first token. Default: the mix's.")
    ] = None,
    slo_gap_ms: Annotated[
        float | None, typer.Option(min=0, help="Allows this p90 gap within a request. Default: the mix's.")
    ] = None,
    slo_fraction: Annotated[
        float | None, typer.Option(min=0.01, max=1, help="Requires this fraction of requests to keep both.")
    ] = None,
    precision: Annotated[
        float,
        typer.Option(min=0.01, max=1, help="Finds the goodput to within this fraction of it."),
    ] = 0.05,
    budget_seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Ends a sweep after this time. Default: 420, or 75 without a server."),
    ] = None,
    max_concurrency: Annotated[
        int, typer.Option(min=1, help="Fails an arrival while this many requests are under way.")
    ] = 4096,
    timeout: Annotated[float, typer.Option(min=0.1, help="Gives up on a request after this many seconds.")] = 600.0,
    processes: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Generates load in this many processes. Default: 1 for 4 cores, up to 4."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides arrivals, lengths and tokens.")] = 0,
    salt: Annotated[str, typer.Option(help="Sets cache_salt, so that only these requests share cached prefixes.")] = "",
    vocab_size: Annotated[
        int | None, typer.Option(min=2, help="Draws token ids below this. Default: the model's, or 32000.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Writes all numbers as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draws them into a PNG.")] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    as_json: AsJson = False,
) -> None:
    """Load a server in an open loop, and report whether it keeps a service level.

    Without --grpc and --url it starts a small cluster on this machine's CPU. See docs/benchmarking.md.
    """
    from tandem.cluster.tools.bench.report import check_plots, draw_runs, one_line, print_report, write_json
    from tandem.cluster.tools.bench.serve import serve_bench
    from tandem.cluster.tools.bench.settings import LoadOptions, Settings
    from tandem.cluster.tools.bench.targets import TargetSpec

    files = (None if path is None else str(path) for path in (token_file, tls_ca, tls_cert, tls_key))
    settings = Settings(
        TargetSpec(grpc or "", tuple(url or ()), endpoint, model_name or "", salt, *files),
        LoadOptions(seconds, requests, warmup_seconds, tail_seconds, max_concurrency=max_concurrency, timeout=timeout),
        mix=mix, prompt_tokens=prompt_tokens, output_tokens=output_tokens, prefix=prefix, prefixes=prefixes,
        turns=turns, pause_seconds=pause_seconds, trace=trace, rates=tuple(rate or ()),
        sweeps=sweep or not (rate or trace), slo_ttft_ms=slo_ttft_ms, slo_gap_ms=slo_gap_ms,
        slo_fraction=slo_fraction, burstiness=burstiness, precision=precision, budget_seconds=budget_seconds,
        processes=processes, seed=seed, vocab_size=vocab_size,
    )  # fmt: skip
    settings.check()
    if plot is not None:
        check_plots()
    if settings.is_embedded:
        from tandem.cluster.tools.embedded import embedded_cluster

        print("no --grpc and no --url: starting a tiny model on this machine's CPU", file=sys.stderr, flush=True)
        server = embedded_cluster()
    else:
        server = nullcontext()
    with server as address:
        result = asyncio.run(
            serve_bench(settings, address, lambda numbers: print(one_line(numbers), file=sys.stderr, flush=True))
        )
    if output is not None:
        write_json(result.numbers, output)
    if plot is not None:
        draw_runs(result, settings.slo, plot)
    if as_json:
        print(json.dumps(result.numbers, indent=1))
    else:
        print_report(result, settings.slo)
