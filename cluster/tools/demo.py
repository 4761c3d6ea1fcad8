"""`make demo`: a cluster of two workers answers several prompts at once, then prints their times and sizes.

python -m tandem.cluster.tools.demo [--speculate [METHOD]]

--speculate: a smaller model, which was trained towards the demo's, drafts tokens; with `ngram` the last tokens are
looked up in prompt and output instead. A second round asks again, behind the answers of the first. The end tells how
many drafted tokens held in each.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tandem.cluster.client.client import AsyncClient
from tandem.cluster.client.client_messages import Timings, Usage
from tandem.cluster.supervision.forking import prefer_idle_threads

MODEL = Path(__file__).parent / "demo_model" / "checkpoint"
DRAFTER = MODEL.parent / "drafter"
SPECULATION: dict[str, dict[str, Any]] = {
    "draft_model": {"speculation.method": "draft_model", "speculation.draft": str(DRAFTER), "speculation.tokens": 4},
    "ngram": {"speculation.method": "ngram", "speculation.tokens": 4},
}
PROMPTS = (
    "The with statement is used to",
    "A prefill worker",
    "user: What is the try statement?\nassistant:",
    "A function definition",
    "user: What is a cache?\nassistant:",
    "The for statement is used to iterate over the elements of a sequence (such as a string, tuple or list) or other "
    "iterable object: The expression list is evaluated once; it should yield an iterable object.",
)
OUTPUT_TOKENS = 96


@dataclass
class DemoRequest:
    """One request and its answer so far."""

    prompt: str
    text: str = ""
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def milliseconds_per_token(self) -> float:
        tokens = self.usage.output_tokens if self.usage else 0
        return (self.times[-1] - self.times[0]) / max(tokens - 1, 1) * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="demo", description="a cluster of two workers answers several prompts")
    parser.add_argument(
        "--speculate", nargs="?", const="draft_model", choices=list(SPECULATION), help="draft tokens, and verify them"
    )
    speculate = parser.parse_args(arguments).speculate
    if not MODEL.is_dir():
        parser.error(f"{MODEL} is not there: only a checkout has the demo's model, and no wheel; use `make demo`")
    console = Console()
    before = set(os.listdir("/dev/shm"))
    console.print("[bold]tandem demo[/]: a Llama of 3 million parameters, 1 prefill and 1 decode worker")
    began = time.perf_counter()
    prefer_idle_threads()
    from tandem.cluster.tools.embedded import embedded_cluster  # which imports torch

    with embedded_cluster("demo", MODEL, SPECULATION.get(speculate, {}), is_fresh=True) as address:
        console.print(f"ready grpc={address} after {time.perf_counter() - began:.1f} s")
        rows = [DemoRequest(prompt) for prompt in PROMPTS]
        seconds = asyncio.run(_run(address, rows, console))
        again = [DemoRequest(f"{row.prompt}{row.text}\n{row.prompt}") for row in rows] if speculate else []
        if again:
            console.print("\neach prompt again, behind its answer")
            asyncio.run(_run(address, again, console))
    console.print()
    console.print(_summary(rows))
    tokens = sum(row.usage.output_tokens for row in rows if row.usage)
    console.print(f"{len(rows)} requests, {tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")
    if speculate:
        for name, asked in (("first", rows), ("again", again)):
            console.print(f"{name}: {_acceptance([row.usage for row in asked if row.usage])}")
    left = set(os.listdir("/dev/shm")) - before
    console.print(f"[red]left in /dev/shm: {sorted(left)}[/]" if left else "stopped; /dev/shm is as it was")
    return 1 if left else 0


async def _run(address: str, rows: list[DemoRequest], console: Console) -> float:
    """Streams all rows at once. Returns the seconds from the first request to the last token."""
    async with AsyncClient(address) as client:
        began = time.perf_counter()
        with Live(_streaming(rows), console=console, refresh_per_second=12) as live:
            done = asyncio.gather(*(_stream(client, row) for row in rows))
            while not done.done():
                await asyncio.wait([done], timeout=0.08)
                live.update(_streaming(rows))
            await done
        return time.perf_counter() - began


async def _stream(client: AsyncClient, row: DemoRequest) -> None:
    row.sent = time.perf_counter()
    async for update in client.generate(row.prompt, max_tokens=OUTPUT_TOKENS, temperature=0):
        row.times.append(time.perf_counter())
        row.text += update.text
        row.usage, row.timings = update.usage, update.timings


def _streaming(rows: list[DemoRequest]) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 1))
    for row in rows:
        table.add_row(f"[cyan]{_short(row.prompt, 30)}[/]", _short(row.text, 80))
    return table


def _acceptance(usages: Sequence[Usage]) -> str:
    """Reports how drafts were accepted: an accepted token is one that no step of its own computed."""
    drafted, accepted = (sum(getattr(one, f"{name}_tokens") for one in usages) for name in ("drafted", "accepted"))
    steps = sum(one.output_tokens - 1 for one in usages) - accepted
    each = (steps + accepted) / max(steps, 1)
    share = accepted / max(drafted, 1)
    return f"{drafted} tokens drafted, {accepted} accepted ({share:.0%}): {each:.2f} tokens a step of a request"


def _summary(rows: list[DemoRequest]) -> Table:
    table = Table(title="one row a request")
    columns = ("prompt", "in", "out", "first token", "per token", "pushed", "pages")
    for column in columns:
        table.add_column(column, justify="left" if column == "prompt" else "right")
    for row in rows:
        assert row.usage is not None
        assert row.timings is not None
        table.add_row(
            _short(row.prompt, 40),
            str(row.usage.prompt_tokens),
            str(row.usage.output_tokens),
            f"{(row.times[0] - row.sent) * 1e3:.1f} ms",
            f"{row.milliseconds_per_token:.2f} ms",
            f"{row.timings.bytes_pushed / 1024:.0f} KiB",
            str(row.timings.pages),
        )
    return table


def _short(text: str, width: int) -> str:
    text = " ".join(text.split()).replace("[", "\\[")
    return text if len(text) <= width else text[: width - 1] + "…"


if __name__ == "__main__":
    sys.exit(main())
