"""deploy/systemd: systemd takes the units, they are confined, and they agree with `tandem up` and `ray start`."""

import configparser
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tandem.cluster.cli import preflight, service_manager
from tandem.cluster.processes.own_ray import OBJECT_STORE_BYTES, SETTINGS
from tests.deploy.known import DEPLOY, parse_ray, parse_tandem, stop_seconds
from tests.deploy.on_hosts import unit_environ, unit_values

UNIT = DEPLOY / "systemd" / "tandem.service"
HEAD, WORKER = (DEPLOY / "systemd" / f"tandem-{name}.service" for name in ("head", "worker"))
JOINS = DEPLOY / "systemd" / "several-hosts.conf"
TEXT = UNIT.read_text(encoding="utf-8")
DRAIN_SECONDS = 25.0  # of which the unit says that they fit
EXPOSURE = 25  # tenths: `systemd-analyze security` calls up to 2.5 well confined
BEAT_SECONDS = 20.0  # between two signs of life, as the unit says
CONFIG_ERROR = "2"  # the exit code of a wrong configuration
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


class Unit(configparser.RawConfigParser):
    """Keys keep their case; a key may come again."""

    def __init__(self, text: str) -> None:
        super().__init__(strict=False, comment_prefixes=("#",), delimiters=("=",), interpolation=None)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read_string(text)


def findings(text: str) -> Iterator[str]:
    service = Unit(text)["Service"]
    try:
        name, given = parse_tandem(shlex.split(service["ExecStart"]))
        if name != "up" or given["address"] is not None:
            yield "ExecStart does not start a cluster on a Ray of its own"
    except click.UsageError as error:
        yield str(error)
    if (service["Type"], service["NotifyAccess"]) != ("notify", "main"):
        yield f"Type={service['Type']}: `tandem up` notifies systemd itself"
    if float(service["WatchdogSec"]) / service_manager.BEATS < BEAT_SECONDS:
        yield f"WatchdogSec={service['WatchdogSec']}: a busy host may be silent for so long"
    if service["TimeoutStartSec"] != "infinity":
        yield f"TimeoutStartSec={service['TimeoutStartSec']}: a start that makes progress has no limit"
    if service["KillMode"] != "mixed" or service["KillSignal"] != "SIGTERM":
        yield "a stop must reach `tandem up` alone: its workers and its Ray serve while it drains"
    if float(service["TimeoutStopSec"]) < stop_seconds(DRAIN_SECONDS):
        yield f"TimeoutStopSec={service['TimeoutStopSec']}: a stop takes up to {stop_seconds(DRAIN_SECONDS)} s"
    if service["LimitNOFILE"] != str(preflight.MOST_FILES) or service["LimitMEMLOCK"] != "infinity":
        yield f"LimitNOFILE must be {preflight.MOST_FILES}, and LimitMEMLOCK infinity"
    if CONFIG_ERROR not in service["RestartPreventExitStatus"].split() or service["Restart"] != "on-failure":
        yield "a lost Ray must start it again, a wrong configuration must not"
    folders = dict(pair.split("=", 1) for pair in service["Environment"].split())
    for variable, key, base in (
        ("HOME", "StateDirectory", "/var/lib"),
        ("XDG_RUNTIME_DIR", "RuntimeDirectory", "/run"),
        ("TANDEM_KERNEL_CACHE", "CacheDirectory", "/var/cache"),
    ):
        if folders.get(variable) != f"{base}/{service[key]}" or service[f"{key}Mode"] != "0700":
            yield f"{variable} is {folders.get(variable)}; {key} makes {base}/{service[key]}, for its owner only"


def test_the_unit_is_true() -> None:
    assert list(findings(TEXT)) == []


@pytest.mark.parametrize(
    ("before", "after", "finding"),
    [
        ("tandem up /etc", "tandem run /etc", "none of the commands"),
        ("cluster.yaml\n", "cluster.yaml --address auto\n", "a Ray of its own"),
        ("Type=notify", "Type=exec", "notifies systemd"),
        ("NotifyAccess=main", "NotifyAccess=none", "notifies systemd"),
        ("WatchdogSec=60", "WatchdogSec=5", "may be silent"),
        ("TimeoutStartSec=infinity", "TimeoutStartSec=90", "no limit"),
        ("KillMode=mixed", "KillMode=control-group", "alone"),
        ("TimeoutStopSec=120", "TimeoutStopSec=30", "a stop takes up to"),
        ("LimitNOFILE=65536", "LimitNOFILE=1024", "LimitNOFILE must be"),
        ("PreventExitStatus=2", "PreventExitStatus=1", "wrong configuration"),
        ("XDG_RUNTIME_DIR=/run/tandem", "XDG_RUNTIME_DIR=/tmp", "RuntimeDirectory makes"),
    ],
)
def test_an_error_in_it_is_found(before: str, after: str, finding: str) -> None:
    assert before in TEXT
    assert any(finding in found for found in findings(TEXT.replace(before, after)))


def findings_of_nodes(head: str, worker: str, joins: str) -> Iterator[str]:
    """Yields the faults of the units of several hosts."""
    ours = TEXT.split("[Service]")[1]
    for text in (head, worker):
        (line,) = unit_values(text, "ExecStart")
        try:
            name, given = parse_ray(shlex.split(line))
        except click.UsageError as error:
            yield str(error)
            continue
        if (name, given["block"], given["node_ip_address"]) != ("start", True, "${TANDEM_HOST}"):
            yield f"Ray must stay, and listen on its host's own address: {line}"
        if given["object_store_memory"] != OBJECT_STORE_BYTES:
            yield f"object-store-memory must be {OBJECT_STORE_BYTES}"
        wanted = SETTINGS | {"RAY_AUTH_MODE": "token"}
        if {name: unit_environ(text).get(name) for name in wanted} != wanted:
            yield f"Ray's settings must be {SETTINGS}, and its token must be asked for"
        if unit_values(text, "Restart") != ["always"] or unit_values(text, "StartLimitIntervalSec") != ["0"]:
            yield "a node that has lost its head must join again, as often as that happens"
        kept = {line for line in _confined(ours) if line not in text.splitlines()}
        if kept:
            yield f"tandem.service is confined by {sorted(kept)}, too"
    first = parse_ray(shlex.split(unit_values(head, "ExecStart")[0]))[1]
    if not first["head"] or not str(first["temp_dir"]).startswith("/var/lib/tandem/"):
        yield "the head must have a folder that tandem.service sees"
    port = first["port"]
    if parse_ray(shlex.split(unit_values(worker, "ExecStart")[0]))[1]["address"] != f"${{TANDEM_HEAD}}:{port}":
        yield f"a worker must join the head at port {port}"
    starts = unit_values(f"{TEXT}\n{joins}", "ExecStart")
    name, given = parse_tandem(shlex.split(starts[-1]))
    if len(starts) != 1 or (name, given["address"]) != ("up", f"${{TANDEM_HOST}}:{port}"):
        yield f"tandem.service must start once, on the Ray at port {port}: {starts}"
    if unit_values(joins, "Requires") != [HEAD.name] or unit_values(joins, "After") != [HEAD.name]:
        yield f"tandem.service must come after {HEAD.name}"


def _confined(service: str) -> list[str]:
    """The lines that say what a unit may do and use."""
    return [line for line in service.split("LimitNOFILE")[1].splitlines()[1:] if "=" in line and "WantedBy" not in line]


NODES = tuple(path.read_text(encoding="utf-8") for path in (HEAD, WORKER, JOINS))


def test_the_units_of_several_hosts_are_true() -> None:
    assert list(findings_of_nodes(*NODES)) == []


@pytest.mark.parametrize(
    ("number", "before", "after", "finding"),
    [
        (0, "ray start --block", "ray start", "must stay"),
        (0, "${TANDEM_HOST} --port", "127.0.0.1 --port", "own address"),
        (0, "--port=6379", "--port=6380", "at port 6380"),
        (0, "/var/lib/tandem/ray", "/tmp/ray", "a folder that tandem.service sees"),
        (0, "83886080", "83886081", "object-store-memory"),
        (1, "RAY_worker_niceness=0", "", "Ray's settings"),
        (1, "RAY_AUTH_MODE=token", "", "its token"),
        (1, "Restart=always", "Restart=on-failure", "join again"),
        (1, "NoNewPrivileges=yes\n", "", "is confined by"),
        (1, "--min-worker-port", "--least-worker-port", "--least-worker-port"),
        (2, "ExecStart=\n", "", "must start once"),
        (2, "${TANDEM_HOST}:6379", "auto", "on the Ray at port"),
        (2, "Requires=tandem-head", "Requires=tandem-ray", "come after"),
    ],
)
def test_an_error_in_those_of_several_hosts_is_found(number: int, before: str, after: str, finding: str) -> None:
    texts = list(NODES)
    assert before in texts[number]
    texts[number] = texts[number].replace(before, after)
    assert any(finding in found for found in findings_of_nodes(*texts))


def complaints(text: str, folder: Path, name: str = UNIT.name) -> str:
    """Returns what systemd reports of a unit, whose program is replaced here."""
    unit = folder / name
    text = re.sub("/opt/tandem/bin/(tandem|ray)", str(shutil.which("true")), text)
    unit.write_text(text, encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return ran.stderr or f"exit code {ran.returncode}" * bool(ran.returncode)


@needs_systemd
def test_systemd_takes_it(tmp_path: Path) -> None:
    assert complaints(TEXT, tmp_path) == ""
    assert "ProtectSystems" in complaints(TEXT.replace("ProtectSystem=", "ProtectSystems="), tmp_path)
    assert "kill mode" in complaints(TEXT.replace("KillMode=mixed", "KillMode=gentle"), tmp_path)
    for path in (HEAD, WORKER):
        assert complaints(path.read_text(encoding="utf-8"), tmp_path, path.name) == ""


def exposed(text: str, folder: Path) -> bool:
    unit = folder / UNIT.name
    unit.write_text(text, encoding="utf-8")
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", str(unit)]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode != 0


@needs_systemd
def test_it_is_confined(tmp_path: Path) -> None:
    assert not exposed(TEXT, tmp_path)
    assert exposed(TEXT.replace("CapabilityBoundingSet=\n", ""), tmp_path)
    for path in (HEAD, WORKER):
        assert not exposed(path.read_text(encoding="utf-8"), tmp_path)
