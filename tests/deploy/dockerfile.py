"""Reads a Dockerfile as its instructions, and finds faults of ours."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from tandem.cluster.config.sections import GatewaySection
from tandem.cluster.frontends.http.monitoring import READY
from tandem.cluster.processes.own_ray import LOOPBACK, SETTINGS
from tests.deploy.known import EXTRAS, PINS, ROOT, parse_tandem

INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL"}
INSTRUCTIONS |= {"USER", "WORKDIR"}
SECRET = re.compile(r"TOKEN|PASSWORD|SECRET|API_KEY|CREDENTIAL", re.IGNORECASE)
LEAST_USER = 1000


@dataclass
class Stage:
    """One stage, with its instructions as (name, arguments). Comments and line breaks are gone."""

    name: str
    base: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [arguments for known, arguments in self.lines if known == name]

    @property
    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for line in self.all("ENV") for pair in shlex.split(line))


def stages(text: str) -> list[Stage]:
    """Returns the stages. ValueError for an unknown instruction."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    found = [Stage("", "")]  # what stands before the first FROM
    for line in filter(str.strip, joined.splitlines()):
        name, _, arguments = line.strip().partition(" ")
        if name not in INSTRUCTIONS:
            raise ValueError(f"{name} is no instruction")
        if name == "FROM":
            base, _, alias = arguments.partition(" AS ")
            found.append(Stage(alias, base))
        else:
            found[-1].lines.append((name, arguments.strip()))
    return found


def healthcheck(stage: Stage) -> str:
    """Returns the shell command of HEALTHCHECK."""
    return stage.all("HEALTHCHECK")[-1].partition("CMD ")[2]


def findings(text: str, ignored: str) -> list[str]:
    """Returns the faults of a Dockerfile whose .dockerignore is `ignored`. Empty for a good one."""
    try:
        head, *built = stages(text)
    except ValueError as error:
        return [str(error)]
    return [
        *_of_copies(built, ignored),
        *(finding for stage in built for finding in (*_of_runs(stage), *_of_secrets(stage))),
        *_of_bases(head, built),
        *_of_runtime(built[-1]),
    ]


def _of_copies(built: list[Stage], ignored: str) -> Iterator[str]:
    kept = [line.removeprefix("!") for line in ignored.splitlines() if line.startswith("!")]
    if "**" not in ignored.splitlines():
        yield "the .dockerignore does not begin by leaving out everything"
    known = set[str]()
    for stage in built:
        for line in stage.all("COPY"):
            options = dict(re.findall(r"--(\w+)=(\S+)", line))
            *sources, _ = [word for word in line.split() if not word.startswith("--")]
            if "from" in options:
                if options["from"] not in known:
                    yield f"COPY --from={options['from']}: no earlier stage"
                continue
            for source in sources:
                if not any(ROOT.glob(source)):
                    yield f"COPY {source}: there is no such file"
                elif not any(Path(source).is_relative_to(folder) for folder in kept):
                    yield f"COPY {source}: the .dockerignore leaves it out"
        known.add(stage.name)


def _of_runs(stage: Stage) -> Iterator[str]:
    for line in stage.all("RUN"):
        script = re.sub(r"^(--\S+\s+)+", "", line)
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=10, check=False)
        if checked.returncode:
            yield f"RUN {script[:40]}: {checked.stderr}"
        for command in re.split(r"&&|;|\|\|", script):
            words = shlex.split(command.replace("$(echo ", "").replace(")[", "["))
            if "pip" in "".join(words[:1]) and "install" in words:
                yield from _of_install(words)
            if "then" in words:
                words = words[words.index("then") + 1 :]
            if words[:1] == ["tandem"]:
                yield from _of_command(words)


def _of_install(words: list[str]) -> Iterator[str]:
    if "constraints.txt" not in words:
        yield f"{shlex.join(words)}: not pinned by constraints.txt"
    for package in words[words.index("constraints.txt") + 1 :] if "constraints.txt" in words else ():
        if "tandem" not in package and package not in PINS:
            yield f"pip install {package}: constraints.txt does not pin it"


def _of_command(words: list[str]) -> Iterator[str]:
    try:
        parse_tandem(words)
    except click.UsageError as error:
        yield str(error)


def _of_secrets(stage: Stage) -> Iterator[str]:
    for name, arguments in stage.lines:
        if name in ("ARG", "ENV") and SECRET.search(arguments):
            yield f"{name} {arguments}: a layer or the history would keep a secret"


def _of_bases(head: Stage, built: list[Stage]) -> Iterator[str]:
    given = dict(line.split("=", 1) for line in head.all("ARG"))
    for stage in built:
        base = re.sub(r"\$\{(\w+)\}", lambda found: given.get(found[1], ""), stage.base)
        if base != "scratch" and base not in {one.name for one in built} and not re.search(r":[\w.-]+$", base):
            yield f"FROM {stage.base}: no tag"
    extras = next(line.split("=")[1] for stage in built for line in stage.all("ARG") if line.startswith("EXTRAS="))
    if not set(extras.split(",")) <= EXTRAS:
        yield f"ARG EXTRAS={extras}: the project has {', '.join(sorted(EXTRAS))}"


def _of_runtime(stage: Stage) -> Iterator[str]:
    environment, users = stage.environment, stage.all("USER")
    ids = re.fullmatch(r"(\d+):(\d+)", users[-1]) if users else None
    if ids is None or int(ids[1]) < LEAST_USER:
        yield f"USER {users}: it must be the numbers of an unprivileged user"
    packages = " ".join(stage.all("RUN"))
    command = json.loads(stage.all("ENTRYPOINT")[-1]) + json.loads(stage.all("CMD")[-1])
    for program in (command[0], "curl", "gcc"):
        if not re.search(rf" {program}\b", packages):
            yield f"{program} is not installed"
    try:
        _, parameters = parse_tandem(command[2:])
        if not (ROOT / "deploy" / Path(parameters["config"]).name).is_file():
            yield f"CMD {parameters['config']}: no such file in deploy/"
    except click.UsageError as error:
        yield f"ENTRYPOINT and CMD: {error}"
    wanted = {LOOPBACK: "0", **SETTINGS}
    if {name: environment.get(name) for name in wanted} != wanted:
        yield f"ENV: Ray's settings must be {wanted}"
    port = environment.get("TANDEM_METRICS__PORT", "")
    urls = re.findall(r"https?://127\.0\.0\.1:(\d+)(/\w+)", healthcheck(stage))
    if not urls or set(urls) != {(port, READY)}:
        yield f"HEALTHCHECK asks for {urls}; it must be {READY} at TANDEM_METRICS__PORT, {port!r}"
    exposed = " ".join(stage.all("EXPOSE")).split()
    if not {str(GatewaySection().port), port} <= set(exposed):
        yield f"EXPOSE {exposed}: without the gateway's port or that of metrics"
