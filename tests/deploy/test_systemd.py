"""deploy/systemd/tandem.service: systemd takes it, it is confined, and it agrees with `tandem up`."""

import configparser
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tandem.cluster.cli import preflight
from tests.deploy.known import DEPLOY, ROOT, parse_tandem, stop_seconds

UNIT = DEPLOY / "systemd" / "tandem.service"
TEXT = UNIT.read_text(encoding="utf-8")
DRAIN_SECONDS = 25.0  # of which the unit says that they fit
EXPOSURE = 25  # tenths: `systemd-analyze security` calls up to 2.5 well confined
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
    notifies = any("NOTIFY_SOCKET" in path.read_text(encoding="utf-8") for path in (ROOT / "cluster").rglob("*.py"))
    if service["Type"] != ("notify" if notifies else "exec"):
        yield f"Type={service['Type']}: tandem {'notifies' if notifies else 'does not notify'} systemd"
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
        ("Type=exec", "Type=notify", "does not notify"),
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


def complaints(text: str, folder: Path) -> str:
    """What systemd says of a unit, whose program stands here elsewhere."""
    unit = folder / UNIT.name
    unit.write_text(text.replace("/opt/tandem/bin/tandem", str(shutil.which("true"))), encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return ran.stderr or f"exit code {ran.returncode}" * bool(ran.returncode)


@needs_systemd
def test_systemd_takes_it(tmp_path: Path) -> None:
    assert complaints(TEXT, tmp_path) == ""
    assert "ProtectSystems" in complaints(TEXT.replace("ProtectSystem=", "ProtectSystems="), tmp_path)
    assert "kill mode" in complaints(TEXT.replace("KillMode=mixed", "KillMode=gentle"), tmp_path)


def exposed(text: str, folder: Path) -> bool:
    unit = folder / UNIT.name
    unit.write_text(text, encoding="utf-8")
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager", str(unit)]
    return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode != 0


@needs_systemd
def test_it_is_confined(tmp_path: Path) -> None:
    assert not exposed(TEXT, tmp_path)
    assert exposed(TEXT.replace("CapabilityBoundingSet=\n", ""), tmp_path)
