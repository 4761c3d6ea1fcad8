"""deploy/ray: Ray's own schema takes the files, and their commands are Ray's and ours."""

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
HOSTS = (DEPLOY / "ray" / "hosts.yaml").read_text(encoding="utf-8")
MADE = {"dist", "ray-token"}  # before `ray up`, by lines of the file


def findings(text: str) -> Iterator[str]:
    config: dict[str, Any] = yaml.safe_load(text)
    try:
        validate_config(prepare_config(yaml.safe_load(text)))
    except (jsonschema.ValidationError, ValueError, RuntimeError) as error:
        yield str(error)
        return
    workers = config["provider"]["worker_ips"]
    if {config["max_workers"], config.get("min_workers", 0)} != {len(workers)}:
        yield f"min_workers and max_workers must be the number of worker_ips, {len(workers)}"
    for source in config["file_mounts"].values():
        if source not in MADE and not (ROOT / source).exists():
            yield f"file_mounts: there is no {source}"
    commands = [*config["setup_commands"], *config["head_start_ray_commands"]]
    if workers:
        yield from _of_workers(config)
    commands += [part for line in re.findall(r"^#\s+(ray .*)$", text, re.MULTILINE) for part in _parts_of_exec(line)]
    parsed = list[tuple[str, dict[str, Any]]]()
    for command in commands:
        try:
            parsed += _parse(command)
        except click.UsageError as error:
            yield str(error)
    yield from _of_start(config["head_start_ray_commands"][-1], dict(parsed), alone=not workers)
    extras = set(re.findall(r"\[([\w,]+)\]", " ".join(config["setup_commands"]))[0].split(","))
    if not extras <= EXTRAS:
        yield f"extras {extras - EXTRAS}: the project has none such"


def _of_start(command: str, parsed: dict[str, dict[str, Any]], *, alone: bool) -> Iterator[str]:
    """alone: on one host, and so on loopback."""
    yield from _of_settings(command, ({LOOPBACK: "0"} if alone else {"RAY_AUTH_MODE": "token"}) | SETTINGS)
    start, up = parsed.get("start", {}), parsed.get("up", {})
    wanted = {"head": True, "object_store_memory": OBJECT_STORE_BYTES}
    wanted["node_ip_address"] = "127.0.0.1" if alone else None
    if {name: start.get(name) for name in wanted} != wanted:
        yield f"ray start must have {wanted}"
    if up.get("address") != f"127.0.0.1:{start.get('port')}":
        yield f"tandem up joins {up.get('address')}, and Ray is at port {start.get('port')}"
    if not up.get("config") or not (DEPLOY / up["config"].name).is_file():
        yield f"tandem up {up.get('config')}: no such file in deploy/"


def _of_workers(config: dict[str, Any]) -> Iterator[str]:
    command = config["worker_start_ray_commands"][-1]
    yield from _of_settings(command, SETTINGS | {"RAY_AUTH_MODE": "token"})
    try:
        ((_, given),) = _parse(command)
        (*_, (_, head)) = _parse(config["head_start_ray_commands"][-1])
    except click.UsageError as error:
        yield str(error)
        return
    if given["address"] != f"$RAY_HEAD_IP:{head['port']}":
        yield f"a further host joins {given['address']}, and the head is at port {head['port']}"
    for name in (
        "object_store_memory",
        "node_manager_port",
        "object_manager_port",
        "min_worker_port",
        "max_worker_port",
    ):
        if given[name] is None or given[name] != head[name]:
            yield f"{name} is {head[name]} at the head, and {given[name]} elsewhere"
    if head["autoscaling_config"] != "~/ray_bootstrap_config.yaml":
        yield "the head does not start Ray on the other hosts: --autoscaling-config"
    if config["file_mounts"].get("~/.ray/auth_token") != "ray-token":
        yield "the hosts have no token of Ray in common"


def _of_settings(command: str, wanted: dict[str, str]) -> Iterator[str]:
    settings = dict(word.split("=", 1) for word in shlex.split(command) if re.match(r"RAY_\w+=", word))
    if settings != wanted:
        yield f"Ray's settings must be {wanted}"


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


@pytest.mark.parametrize("text", [TEXT, HOSTS])
def test_the_file_is_true(text: str) -> None:
    assert list(findings(text)) == []


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("max_workers: 2", "max_workers: 1", "smaller than the sum of `min_workers`"),
        ("    - gpu-host-3.example.org\n", "", "must be the number of worker_ips, 1"),
        ("~/.ray/auth_token: ray-token", "~/.ray/token: ray-token", "no token of Ray in common"),
        ("--autoscaling-config=~/ray_bootstrap_config.yaml", "", "start Ray on the other hosts"),
        ("--address=$RAY_HEAD_IP:6379", "--address=$RAY_HEAD_IP:6380", "the head is at port 6379"),
        ("--head --port=6379", "--head --node-ip-address=127.0.0.1 --port=6379", "ray start must have"),
        ("RAY_AUTH_MODE=token", "", "Ray's settings"),
        ("--min-worker-port=10002", "--min-worker-port=10003", "min_worker_port is 10003 at the head"),
        ("gpu-hosts.yaml", "gpu-host.yaml", "no such file"),
    ],
)
def test_an_error_in_the_one_of_several_hosts_is_found(before: str, after: str, finding: str) -> None:
    assert before in HOSTS
    found = list(findings(HOSTS.replace(before, after, 1)))
    assert any(finding in one for one in found), found


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("setup_commands:", "setups:", "'setups' was unexpected"),
        ("cluster_name: tandem", "cluster_name: [tandem]", "is not of type 'string'"),
        ("max_workers: 0", "max_workers: 1", "must be the number of worker_ips, 0"),
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
        ("[cuda13]", "[cuda14]", "cuda14"),
    ],
)
def test_an_error_in_it_is_found(before: str, after: str, finding: str) -> None:
    assert before in TEXT
    found = list(findings(TEXT.replace(before, after)))
    assert any(finding in one for one in found), found
