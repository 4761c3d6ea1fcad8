"""`tandem top`: what the cluster does right now, from one scrape to the next."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tandem.cluster.cli.samples import Interval, Samples
from tandem.cluster.client.client import Client
from tandem.cluster.errors import Unavailable
from tandem.proto import inference_pb2

FRACTIONS = (0.5, 0.9, 0.99)
PIPE_WIDTH = 140  # columns where no terminal shows them
MIB = 1 << 20


@dataclass(frozen=True)
class WorkerView:
    """One worker. Rates are a second."""

    island: str
    epoch: int
    pe: int
    role: str
    host: str
    alive: bool
    running: int
    waiting: int
    parked: int
    pages: int
    used_pages: int
    cached_pages: int
    draining_pages: int
    host_bytes: int
    host_bytes_used: int
    disk_bytes: int
    disk_bytes_used: int
    adapters: int  # LoRA adapters that it holds
    resident_adapters: int  # of these: on its device
    prompt_tokens: float
    decoded_tokens: float
    pushed_bytes: float
    token_seconds: float
    ranks: int  # its processes; 0 where it has one, or does not answer
    stalled_ranks: list[int]  # those it waits for, and those that have ended


@dataclass(frozen=True)
class ClusterView:
    """The whole cluster. Rates are a second. Percentiles are at FRACTIONS, in seconds, empty before the first value."""

    name: str
    version: str
    uptime_seconds: float
    ready: bool
    queued: int
    in_prefill: int
    in_decode: int
    requests: float
    prompt_tokens: float
    output_tokens: float
    pushed_bytes: float
    first_token_seconds: list[float]
    gap_seconds: list[float]
    island_restarts: int
    gateway_restarts: int
    gateway_processes: int
    replays: int
    moves: int
    rejected: int
    away: list[str]  # islands that are started again
    islands: int
    wanted_islands: int | None  # by the scaling policy; None without one
    starts_nothing: str  # why no process can be placed; empty where it can
    waits_for: str  # why there are not as many
    workers: list[WorkerView]


def watch(client: Client, seconds: float, *, once: bool, as_json: bool) -> None:
    """Shows the cluster until Ctrl-C, or once. On a terminal in place, else view by view.

    Raises the errors of Client.cluster_info. It waits for a gateway that is away for a while, unless it asks once only.
    """
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    views = look(client, seconds, patient=not once)
    if once or as_json or not console.is_terminal:
        for view in views:
            if as_json:
                print(json.dumps(asdict(view)), flush=True)
            else:
                console.print(render(view))
            if once:
                return
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for view in views:
                live.update(render(view), refresh=True)
    except KeyboardInterrupt:
        pass


def look(client: Client, seconds: float, *, patient: bool) -> Iterator[ClusterView]:
    """Yields a view every `seconds`. patient: waits for a gateway that was there before."""
    before = _scrape(client)
    while True:
        time.sleep(seconds)
        try:
            after, info = _scrape(client), client.cluster_info()
        except Unavailable:
            if not patient:
                raise
            continue
        yield view_of(info, Interval(before, after))
        before = after


def view_of(info: inference_pb2.ClusterInfo, interval: Interval) -> ClusterView:
    after = interval.after
    return ClusterView(
        name=info.name,
        version=info.version,
        uptime_seconds=info.uptime_seconds,
        ready=bool(after.total("tandem:ready")),
        queued=int(after.total("tandem:requests", stage="queued")),
        in_prefill=int(after.total("tandem:requests", stage="prefill")),
        in_decode=int(after.total("tandem:requests", stage="decode")),
        requests=interval.rate("vllm:request_success_total"),
        prompt_tokens=interval.rate("vllm:prompt_tokens_total"),
        output_tokens=interval.rate("vllm:generation_tokens_total"),
        pushed_bytes=interval.rate("tandem:push_bytes_total"),
        first_token_seconds=interval.quantiles("vllm:time_to_first_token_seconds", FRACTIONS),
        gap_seconds=interval.quantiles("vllm:inter_token_latency_seconds", FRACTIONS),
        island_restarts=int(after.total("tandem:island_restarts_total")),
        gateway_restarts=int(after.total("tandem:gateway_restarts_total")),
        gateway_processes=int(after.total("tandem:gateway_processes")),
        replays=int(after.total("tandem:replays_total")),
        moves=int(after.total("tandem:moves_total")),
        rejected=int(after.total("tandem:rejected_total")),
        away=[island.name for island in info.islands if not island.workers],
        islands=len(info.islands),
        wanted_islands=info.scaling.wanted_islands if info.HasField("scaling") else None,
        starts_nothing=info.starts_nothing,
        waits_for=info.scaling.waits_for,
        workers=[_worker(island, worker, interval) for island in info.islands for worker in island.workers],
    )


def render(view: ClusterView) -> RenderableType:
    """Returns two lines of totals, and a table of workers."""
    state = Text("ready", "green") if view.ready else Text("not ready", "bold red")
    head = Text.assemble(
        (view.name, "bold"), f"  tandem {view.version}  up {view.uptime_seconds:.0f} s  ", state,
        f"  {view.queued} queued  {view.in_prefill} in prefill  {view.in_decode} in decode  "
        f"restarts {view.island_restarts} (gateway {view.gateway_restarts})  replays {view.replays}  "
        f"moves {view.moves}  rejected {view.rejected}",
        (f"  {', '.join(view.away)} away" if view.away else "", "bold red"),
        _scaling(view),
        (f"  {view.starts_nothing}" if view.starts_nothing else "", "bold red"),
    )  # fmt: skip
    rates = Text(
        f"{view.requests:.1f} requests/s  {view.prompt_tokens:.0f} prompt tokens/s  {view.output_tokens:.0f} output "
        f"tokens/s  {view.pushed_bytes / MIB:.1f} MiB/s pushed  first token {_milliseconds(view.first_token_seconds)}  "
        f"gap {_milliseconds(view.gap_seconds)}"
    )
    return Group(head, rates, _table(view.workers))


def _scaling(view: ClusterView) -> str:
    if view.wanted_islands in (None, view.islands):
        return ""
    return f"  {view.islands} islands of {view.wanted_islands} wanted: {view.waits_for}"


def _table(workers: list[WorkerView]) -> Table:
    table = Table()
    names = ("island", "epoch", "pe", "role", "host", "running", "waiting", "parked", "pages", "cached", "draining")
    tiers = {
        "host MiB": [(one.host_bytes_used, one.host_bytes) for one in workers],
        "disk MiB": [(one.disk_bytes_used, one.disk_bytes) for one in workers],
    }
    tiers = {name: of for name, of in tiers.items() if any(size for _, size in of)}
    adapted = any(one.adapters for one in workers)
    for name in (*names, *tiers, *["LoRA"] * adapted, "prompt tok/s", "decode tok/s", "push MiB/s", "step ms"):
        table.add_column(name, justify="left" if name in ("island", "role", "host") else "right")
    for index, one in enumerate(workers):
        role = f"{one.role} ×{one.ranks}" if one.ranks else one.role
        where = (one.island, one.epoch, one.pe, role, one.host)
        if not one.alive:
            stalled = f", by rank {', '.join(map(str, one.stalled_ranks))}" if one.stalled_ranks else ""
            table.add_row(*map(str, where), f"lost{stalled}", style="bold red")
            continue
        pages = (f"{one.used_pages}/{one.pages}", one.cached_pages, one.draining_pages)
        pages += tuple("/".join(f"{size / MIB:.0f}" for size in of[index]) for of in tiers.values())
        pages += (f"{one.resident_adapters}/{one.adapters}",) * adapted
        load = (one.running, one.waiting, one.parked)
        rates = (f"{one.prompt_tokens:.0f}", f"{one.decoded_tokens:.0f}", f"{one.pushed_bytes / MIB:.1f}")
        table.add_row(*map(str, (*where, *load, *pages, *rates, f"{1000 * one.token_seconds:.1f}")))
    return table


def _worker(island: inference_pb2.IslandInfo, worker: inference_pb2.WorkerInfo, interval: Interval) -> WorkerView:
    def rate(field: str) -> float:
        return interval.rate(f"tandem:worker_{field}_total", island=island.name, pe=str(worker.pe))

    return WorkerView(
        island=island.name,
        epoch=island.epoch,
        pe=worker.pe,
        role=inference_pb2.Role.Name(worker.role).removeprefix("ROLE_").lower(),
        host=worker.address.rpartition(":")[0].replace("unix", "here"),
        alive=worker.alive,
        running=worker.running,
        waiting=worker.waiting,
        parked=worker.parked,
        pages=worker.num_pages,
        used_pages=worker.num_pages - worker.free_pages - worker.draining_pages,
        cached_pages=worker.cached_pages,
        draining_pages=worker.draining_pages,
        host_bytes=worker.host_bytes,
        host_bytes_used=worker.host_bytes_used,
        disk_bytes=worker.disk_bytes,
        disk_bytes_used=worker.disk_bytes_used,
        adapters=len(worker.adapters),
        resident_adapters=sum(adapter.resident for adapter in worker.adapters),
        prompt_tokens=rate("prompt_tokens"),
        decoded_tokens=rate("decoded_tokens"),
        pushed_bytes=rate("bytes_pushed"),
        token_seconds=worker.token_seconds,
        ranks=len(worker.ranks),
        stalled_ranks=[one.rank for one in worker.ranks if one.stalled or not one.alive],
    )


def _scrape(client: Client) -> Samples:
    return Samples(client.metrics().text)


def _milliseconds(seconds: list[float]) -> str:
    """Returns the times at FRACTIONS, in milliseconds."""
    values = "/".join(f"{1000 * one:.0f}" for one in seconds)
    return f"{values} ms (p50/p90/p99)" if seconds else "–"
