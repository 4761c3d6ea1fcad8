"""`tandem replay`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cluster.cli.options import AsJson
from tandem.cluster.errors import UsageError

if TYPE_CHECKING:  # `tandem --help` must not wait for torch
    from tandem.workers.replay.player import Playback, Summary
    from tandem.workers.replay.value_types import ActionEntry

MOST_SHOWN = 160  # characters of an action's arguments


def replay(
    files: Annotated[list[Path], typer.Argument(help="Reads the records of one epoch, a file for each worker.")],
    model: Annotated[
        str | None, typer.Option(help="Reads the checkpoint in this folder. Default: where it was.")
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=0, help="Runs at most this many actions, of all files together.")
    ] = None,
    steps: Annotated[str | None, typer.Option(metavar="N..M", help="Prints the actions N to M, from 0.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run recorded actions again, and compare what they do.

    It compares pages, tokens and pushes. It exits with 0 where all is equal, with 1 at the first difference. See
    record.folder in docs/configuration.md.
    """
    shown = _range(steps)

    from tandem.cluster.cli.replayed_workers import replay_files
    from tandem.workers.replay.errors import RecordError
    from tandem.workers.replay.player import as_json as plain

    def show(number: int, playback: "Playback", action: "ActionEntry") -> None:
        if number in shown:
            print(f"{number} {playback.name} #{action.number} {_described(action)}")

    try:
        summary = replay_files(files, model, until, show)
    except RecordError as error:
        raise UsageError(str(error)) from None
    print(json.dumps(plain(summary), indent=2) if as_json else described(summary))
    if summary.difference is not None:
        raise typer.Exit(1)


def _range(steps: str | None) -> range:
    if steps is None:
        return range(0)
    first, dots, last = steps.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal():
        raise UsageError(f"--steps is {steps!r}; it must be N..M, such as 100..120")
    return range(int(first), int(last) + 1)


def _described(action: "ActionEntry") -> str:
    from tandem.workers.engine.watched_engine import PARAMETERS

    pairs = zip(PARAMETERS[action.name], action.arguments, strict=True)
    text = " ".join(f"{name}={value!r}" for name, value in pairs).replace("\n", "")
    return f"{action.name} {text[:MOST_SHOWN]}{'…' if len(text) > MOST_SHOWN else ''}"


def described(summary: "Summary") -> str:
    """Returns some lines of text."""
    counts = ", ".join(f"{count} {name}" for name, count in summary.by_name.most_common())
    lines = [
        f"{summary.actions} actions of {summary.seconds:.3f} s in {len(summary.files)} files: {counts or 'none'}",
        f"compared: {summary.tokens} tokens, {summary.pushes} pushes of {summary.pushed_positions} positions, "
        f"{summary.page_ids} page ids, {summary.prefix_hits} prefix hits, {summary.raised} errors",
    ]
    if not summary.prompts:
        lines.append("tokens are not compared: the records have none (record.prompts)")
    if summary.missing:
        pes = ", ".join(map(str, summary.missing))
        lines.append(
            f"without the files of PE {pes}, {summary.tokens_left} tokens that follow from their KV are not compared"
        )
    lines += [f"{file}: {reason}" for file, reason in sorted(summary.ends.items())]
    found = summary.difference
    if found is None:
        return "\n".join([*lines, "equal"])
    return "\n".join(
        [
            *lines,
            f"first difference: {found.file}, action {found.number}, {found.action}: {found.what}",
            f"  recorded: {found.recorded}",
            f"  replayed: {found.replayed}",
        ]
    )
