"""deploy/ray/cluster.yaml: Ray's own schema takes it, and its commands are Ray's and ours."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import click
import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tandem.cluster.processes.own_ray import LOOPBACK, OBJECT_STORE_BYTES, SETTINGS
from tests.deploy.known import DEPLOY, EXTRAS, ROOT, parse_ray, parse_tandem

TEXT = (DEPLOY / "ray" / "cluster.yaml").read_text(encoding="utf-8")
MADE = {"dist"}  # by the wheel, before `ray up`


def findings(text: str) -> Iterator[str]:
    config: dict[str, Any] = yaml.safe_load(text)
    try:
        validate_config(prepare_config(yaml.safe_load(text)))
    except (jsonschema.ValidationError, ValueError, RuntimeError) as error:
        yield str(error)
        return
    if config["max_workers"] or config["provider"].get("worker_ips"):
        yield "an island is one host"
    for source in config["file_mounts"].values():
        if source not in MADE and not (ROOT / source).exists():
            yield f"file_mounts: there is no {source}"
    commands = [*config["setup_commands"], *config["head_start_ray_commands"]]
    commands += [part for line in re.findall(r"^#\s+(ray .*)$", text, re.MULTILINE) for part in _parts_of_exec(line)]
    parsed = list[tuple[str, dict[str, Any]]]()
    for command in commands:
        try:
            parsed += _parse(command)
        except click.UsageError as error:
            yield str(error)
    yield from _of_start(config["head_start_ray_commands"][-1], dict(parsed))
    extras = set(re.findall(r"\[([\w,]+)\]", " ".join(config["setup_commands"]))[0].split(","))
    if not extras <= EXTRAS:
        yield f"extras {extras - EXTRAS}: the project has none such"


def _of_start(command: str, parsed: dict[str, dict[str, Any]]) -> Iterator[str]:
    settings = dict(word.split("=", 1) for word in shlex.split(command) if re.match(r"RAY_\w+=", word))
    if settings != {LOOPBACK: "0", **SETTINGS}:
        yield f"Ray's settings must be { ({LOOPBACK: '0', **SETTINGS}) }"
    start, up = parsed.get("start", {}), parsed.get("up", {})
    wanted = {"head": True, "node_ip_address": "127.0.0.1", "object_store_memory": OBJECT_STORE_BYTES}
    if {name: start.get(name) for name in wanted} != wanted:
        yield f"ray start must have {wanted}"
    if up.get("address") != f"127.0.0.1:{start.get('port')}":
        yield f"tandem up joins {up.get('address')}, and Ray is at port {start.get('port')}"
    if not up.get("config") or not (DEPLOY / up["config"].name).is_file():
        yield f"tandem up {up.get('config')}: no such file in deploy/"


def _parts_of_exec(line: str) -> list[str]:
    """The command itself, and what `ray exec` runs there."""
    words = shlex.split(line)
    return [line, words[-1]] if words[1] == "exec" else [line]


def _parse(command: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The commands of Ray and tandem in a line of shell."""
    for part in re.split(r"&&|\|\||;|>", command):
        words = [word for word in shlex.split(part) if not re.match(r"\w+=", word)]
        program = words[0].rpartition("/")[2] if words else ""
        if program in ("ray", "tandem"):
            name, given = parse_ray(words) if program == "ray" else parse_tandem(words)
            if (program, name) != ("ray", "up"):
                yield name, given


def test_the_file_is_true() -> None:
    assert list(findings(TEXT)) == []


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("setup_commands:", "setups:", "'setups' was unexpected"),
        ("cluster_name: tandem", "cluster_name: [tandem]", "is not of type 'string'"),
        ("max_workers: 0", "max_workers: 1", "one host"),
        ("constraints.txt: constraints.txt", "constraints.txt: pins.txt", "there is no pins.txt"),
        ("ray start --head", "ray start --heads", "--heads"),
        ("--node-ip-address=127.0.0.1", "", "ray start must have"),
        ("--object-store-memory=83886080", "", "ray start must have"),
        ("RAY_worker_niceness=0", "", "Ray's settings"),
        ("--port=6379", "--port=6380", "Ray is at port 6380"),
        ("deploy/gpu-1p1d.yaml", "deploy/gpu-9p9d.yaml", "no such file"),
        ("tandem down --timeout 120 ||", "tandem down --wait 120 ||", "--wait"),
        ("bin/tandem status'", "bin/tandem state'", "none of the commands"),
        ("get-auth-token --generate", "get-auth-token --make", "--make"),
        ("cuda13,http", "cuda14,http", "cuda14"),
    ],
)
def test_an_error_in_it_is_found(before: str, after: str, finding: str) -> None:
    assert before in TEXT
    found = list(findings(TEXT.replace(before, after)))
    assert any(finding in one for one in found), found
