"""The `tandem` command's output."""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from google.protobuf.json_format import MessageToJson
from rich.console import Console
from rich.table import Table

from tandem.cluster.client.client_messages import GenerateUpdate, Usage
from tandem.proto import admin_pb2, inference_pb2

PIPE_WIDTH = 140  # columns of a table that no terminal shows


def print_stream(updates: Iterable[GenerateUpdate], count: int = 1) -> None:
    """Prints the text as it comes; token ids for a checkpoint without a tokenizer. Ends the line before an error.

    count: answers. If there are several, each has a line with its index in front, and waits until earlier answers have
    ended.
    """
    answers = [_Shown(f"[{index}] " if count > 1 else "") for index in range(count)]
    turn = 0
    try:
        for update in updates:
            answers[update.index].add(update)
            while turn < count and answers[turn].show():
                answers[turn].end()
                turn += 1
    finally:
        if turn < count:
            answers[turn].end()


class _Shown:
    """One answer on stdout. It holds what it may not show yet."""

    def __init__(self, head: str) -> None:
        self._head = head
        self._held = ""
        self._written = self._finished = False
        self._token_ids: list[int] = []

    def add(self, update: GenerateUpdate) -> None:
        self._held += update.text
        self._token_ids += update.token_ids
        self._finished |= update.finish_reason is not None

    def show(self) -> bool:
        """Returns whether it has ended."""
        if self._held:
            sys.stdout.write(self._head + self._held)
            sys.stdout.flush()
            self._head = self._held = ""
            self._written = True
        return self._finished

    def end(self) -> None:
        """Ends the answer's line."""
        if not self._written:
            sys.stdout.write(self._head * bool(self._token_ids) + " ".join(map(str, self._token_ids)))
        if self._token_ids:
            sys.stdout.write("\n")
            sys.stdout.flush()


def print_json(updates: Iterable[GenerateUpdate], count: int = 1) -> None:
    """Prints one object. token_seconds: each token's arrival here, in seconds from the call. count: answers; of several
    the object has a list."""
    start = time.perf_counter()
    parts: list[list[GenerateUpdate]] = [[] for _ in range(count)]
    seconds: list[list[float]] = [[] for _ in range(count)]
    usage: Usage | None = None
    for update in updates:
        usage = update.usage or usage
        parts[update.index].append(update)
        seconds[update.index] += [round(time.perf_counter() - start, 6)] * len(update.token_ids)
    answers = [_whole(*one) for one in zip(parts, seconds, strict=True)]
    several = {"answers": answers, "usage": None if usage is None else asdict(usage)}
    print(json.dumps(answers[0] if count == 1 else several))  # ASCII: whole in any encoding


def _whole(parts: list[GenerateUpdate], seconds: list[float]) -> dict[str, Any]:
    """Returns one answer as JSON's types."""
    result = asdict(parts[-1]) if parts else {}
    result["text"] = "".join(part.text for part in parts)
    for name in ("token_ids", "logprobs", "prompt_logprobs", "prompt_token_ids"):
        result[name] = [item for part in map(asdict, parts) for item in part[name]]
    return result | {"token_seconds": seconds}


def print_cluster(info: inference_pb2.ClusterInfo, as_json: bool) -> None:
    """Prints a cluster. Its JSON is proto3's own mapping of ClusterInfo, with its field names."""
    if as_json:
        print(MessageToJson(info, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(
        f"{info.name}  tandem {info.version}  up {info.uptime_seconds:.0f} s  "
        f"{info.active} active  {info.queued} queued  gateway restarts {info.gateway_restarts}"
        + (f"  http {info.http_address}" if info.http_address else "")
    )
    if not info.gateways:
        console.print("islands and workers are for operators; use the operator's token to see them")
    if info.starts_nothing:
        console.print(info.starts_nothing, style="bold red")
    if info.HasField("scaling"):
        one = info.scaling
        waits = f"; {one.waits_for}" if one.waits_for else ""
        bounds = f"{one.min_islands} … {one.max_islands}"
        console.print(f"{len(info.islands)} islands of {bounds}, the policy wants {one.wanted_islands}{waits}")
    if len(info.gateways) > 1:
        console.print(_gateways(info.gateways))
    for island in info.islands:
        console.print(_table(island))


def print_scaled(done: admin_pb2.ScaleResponse, as_json: bool) -> None:
    """Prints the island's new shape, and what became of its processes."""
    if as_json:
        print(MessageToJson(done, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    if done.num_islands:
        print(f"{done.num_islands} islands: {done.kept} kept, {done.started} started, {done.ended} ended")
        return
    print(
        f"{done.island}: epoch {done.epoch}, {done.num_prefill} prefill and {done.num_decode} decode workers; "
        f"{done.kept} kept, {done.started} started, {done.ended} ended; away for {done.seconds_away:.1f} s"
    )


def _gateways(gateways: Iterable[inference_pb2.GatewayProcessInfo]) -> Table:
    table = Table(title="gateway processes", title_justify="left")
    for column in ("host", "process", "pid", "active", "queued", "calls", "restarts"):
        table.add_column(column, justify="left" if column == "host" else "right")
    for one in gateways:
        pid = one.pid or "is started again"
        table.add_row(*map(str, (one.host, one.process, pid, one.active, one.queued, one.calls, one.restarts)))
    return table


def _table(island: inference_pb2.IslandInfo) -> Table:
    columns = ("pe", "role", "pid", "address", "pages", "free", "cached", "draining", "running", "waiting", "memory")
    host = f"  host {island.host}" if island.host else ""
    title = f"island {island.name}{host}  epoch {island.epoch}  {island.transport}  restarts {island.restarts}"
    if not island.workers:
        title += "  is started again"
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in ("role", "address") else "right")
    for worker in island.workers:
        role = inference_pb2.Role.Name(worker.role).removeprefix("ROLE_").lower()
        counts = (worker.num_pages, worker.free_pages, worker.cached_pages, worker.draining_pages)
        load = (worker.running, worker.waiting, _memory(worker.resident_bytes))
        cells = (worker.pe, role, worker.pid, worker.address, *counts, *load)
        if not worker.alive:
            cells = (worker.pe, role, "lost", worker.address)
        table.add_row(*map(str, cells))
        if worker.state_pages:
            states = (worker.state_pages, worker.free_state_pages, worker.snapshots)
            table.add_row("", "states", "", "", *map(str, states), "", "", "", _memory(worker.snapshot_bytes))
        for tier, size, used in (
            ("host memory", worker.host_bytes, worker.host_bytes_used),
            ("disk", worker.disk_bytes, worker.disk_bytes_used),
        ):
            if size:
                table.add_row("", tier, *[""] * 8, _memory(used))
        if worker.parked_bytes:
            table.add_row("", "parked", *[""] * 7, str(worker.parked), _memory(worker.parked_bytes_used))
        if worker.adapters:
            held = f"{sum(one.resident for one in worker.adapters)} of {len(worker.adapters)} resident"
            table.add_row("", "adapters", "", held, *[""] * 6, _memory(sum(one.bytes for one in worker.adapters)))
        for one in worker.ranks:
            state = "stalled" if one.stalled else "" if one.alive else "ended"
            if one.rank or state:
                name, rest = f"rank {one.rank} {state}".rstrip(), [""] * 7
                table.add_row("", name, str(one.pid), *rest, _memory(one.resident_bytes))
    return table


def _memory(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
