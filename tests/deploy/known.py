"""The facts that deployment files must agree with: this checkout's version, pins files and command lines."""

import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import ray.scripts.scripts
import typer.main

import tandem
from tandem.cluster.cli.commands import app
from tandem.cluster.supervision import gateway_supervisor, island
from tandem.cluster.supervision.launcher import Cluster

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION: str = tandem.__version__
EXTRAS = set(PROJECT["project"]["optional-dependencies"])
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
RAY_START: Any = ray.scripts.scripts.cli.commands["start"]  # type: ignore[attr-defined]
TANDEM_LINE = re.compile(r"^(?:#\s+)?(?:\S+=\S+ )*(tandem .*)$", re.MULTILINE)


def parse_tandem(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Returns the command and its parameters. click.UsageError if `tandem` would refuse it."""
    if Path(words[0]).name not in PROJECT["project"]["scripts"]:
        raise click.UsageError(f"{words[0]} is none of the project's scripts")
    return _parse(typer.main.get_command(app), list(words[1:]))


def parse_ray(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Parses a `ray` command as parse_tandem() parses `tandem`."""
    if Path(words[0]).name != "ray":
        raise click.UsageError(f"{words[0]} is not ray")
    return _parse(ray.scripts.scripts.cli, list(words[1:]))


def stop_seconds(drain_seconds: float) -> float:
    """The longest that `tandem up` waits for its processes once it is told to stop."""
    grace = Cluster.stop.__defaults__[0]  # type: ignore[index]  # of calls under way
    return drain_seconds + 2 * gateway_supervisor.STOP_SECONDS + grace + island.STOP_SECONDS


def tandem_lines(text: str) -> list[list[str]]:
    """Returns the words of each line that is a `tandem` command. Lines that end with a backslash go on."""
    return [shlex.split(line, comments=True) for line in TANDEM_LINE.findall(text.replace("\\\n", " "))]


def _parse(group: Any, words: list[str]) -> tuple[str, dict[str, Any]]:
    if not words or words[0] not in group.commands:
        raise click.UsageError(f"{words[:1]} is none of the commands {', '.join(group.commands)}")
    name, *rest = words
    command = group.commands[name]
    if hasattr(command, "commands") and rest and rest[0] in command.commands:
        return _parse(command, rest)
    try:
        return name, command.make_context(name, rest).params
    except Exception as error:  # typer may have a click of its own
        raise click.UsageError(f"{shlex.join(words)}: {error}") from error
