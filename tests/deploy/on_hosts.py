"""Commands that the files for several hosts run on each of them: by systemd, by `ray up`, and by KubeRay.

Each start gives the first host's commands, those of a further host, and the one of `tandem up`. Paths of an installed
tandem become those of this checkout.
"""

import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from ray.autoscaler._private.util import with_envs

from tandem.cache.kernels.build.build_once import cache_folder
from tests.deploy import dockerfile, manifest
from tests.deploy.known import DEPLOY
from tests.support.hosts import Hosts

BIN = Path(sys.executable).parent
CONFIG = DEPLOY / "gpu-hosts.yaml"
ONE_WORKER = {"TANDEM_RAY__MIN_HOSTS": "1"}  # beside the head, which has no island


@dataclass(frozen=True)
class Start:
    """Lines of bash with their environment. stays: whether a node's line goes on as long as the node does.

    down: what ends `tandem up`, None where it is a SIGTERM.
    """

    head: str | None  # None: `up` does it
    worker: str
    up: str
    stays: bool
    head_environ: dict[str, str] = field(default_factory=dict)
    worker_environ: dict[str, str] = field(default_factory=dict)
    up_environ: dict[str, str] = field(default_factory=dict)
    down: str | None = None


def unit_values(text: str, key: str) -> list[str]:
    """Returns all values of a unit's key. A backslash at the end continues a line; an empty value drops the earlier
    ones."""
    values: list[str] = []
    for value in re.findall(rf"^{key}=(.*)$", re.sub(r"\\\n\s*", "", text), re.MULTILINE):
        values = [*values, value] if value else []
    return values


def unit_environ(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for value in unit_values(text, "Environment") for pair in shlex.split(value))


def by_systemd(hosts: Hosts, home: Path) -> Start:
    folder = DEPLOY / "systemd"
    head, worker, service, joins = (
        (folder / name).read_text(encoding="utf-8")
        for name in ("tandem-head.service", "tandem-worker.service", "tandem.service", "several-hosts.conf")
    )

    def given(host: int) -> dict[str, str]:
        """Returns /etc/tandem/environment."""
        return {"TANDEM_HOST": hosts.addresses[host], "TANDEM_HEAD": hosts.addresses[0]}

    def here(text: str) -> str:
        for path in ("/var/lib/tandem", "/run/tandem"):
            text = text.replace(path, str(home))
        text = text.replace("/var/cache/tandem", str(cache_folder()))
        return text.replace("/opt/tandem/bin", str(BIN)).replace("/etc/tandem/cluster.yaml", str(CONFIG))

    def environ(text: str, host: int) -> dict[str, str]:
        return {name: here(value) for name, value in (unit_environ(text) | given(host)).items()}

    both = service + "\n" + joins
    return Start(
        here(unit_values(head, "ExecStart")[-1]),
        here(unit_values(worker, "ExecStart")[-1]),
        here(unit_values(both, "ExecStart")[-1]),
        True,
        environ(head, 0),
        environ(worker, 1),
        environ(both, 0),
    )


def by_ray_up(hosts: Hosts, home: Path) -> Start:
    """Makes the start without `ray stop`, which would end every Ray of the machine that these hosts are made of."""
    text = (DEPLOY / "ray" / "hosts.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    (up,) = re.findall(r"^#\s+ray exec \S+ --tmux '(.*)'$", text, re.MULTILINE)
    (down,) = re.findall(r"^#\s+ray exec \S+ '(.* down .*)'$", text, re.MULTILINE)
    alone = config | {"provider": config["provider"] | {"worker_ips": []}, "min_workers": 0, "max_workers": 0}
    (home / "ray_bootstrap_config.yaml").write_text(yaml.safe_dump(alone), encoding="utf-8")

    def here(line: str) -> str:
        line = line.replace("~/tandem/bin", str(BIN)).replace("~/tandem-files/deploy", str(DEPLOY))
        return line.replace(" --model DIR", "")

    def script(lines: list[str]) -> str:
        return "\n".join(here(line) for line in lines if not line.endswith("ray stop"))

    worker = with_envs(config["worker_start_ray_commands"], {"RAY_HEAD_IP": hosts.addresses[0]})
    return Start(script(config["head_start_ray_commands"]), script(list(worker)), here(up), False, down=here(down))


def by_kuberay(hosts: Hosts, home: Path) -> Start:
    given = manifest.read((DEPLOY / "kubernetes" / "raycluster-hosts.yaml").read_text(encoding="utf-8"))
    (home / manifest.CONFIG).write_text(given.config_text, encoding="utf-8")
    (workers,) = given.workers
    image = dockerfile.stages((DEPLOY / "Dockerfile").read_text(encoding="utf-8"))[-1].environment
    ray: Mapping[str, str] = {name: value for name, value in image.items() if name.startswith("RAY_")}
    common = {**ray, "PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin"}
    head_start = given.ray_start(**{"num-cpus": "2"})
    worker_start = workers.ray_start(**{"num-cpus": "2", "address": f"{hosts.addresses[0]}:6379"})
    stop = given.container["lifecycle"]["preStop"]["exec"]["command"]
    return Start(
        None,
        workers.script,
        given.script.replace("/etc/tandem/", f"{home}/"),
        True,
        worker_environ=common | workers.environ | {manifest.START: worker_start},
        up_environ=common | given.environ | {manifest.START: head_start, "RAY_ADDRESS": "127.0.0.1:6379"} | ONE_WORKER,
        down=shlex.join([str(BIN / stop[0]), *stop[1:]]),
    )


STARTS = {"systemd": by_systemd, "ray up": by_ray_up, "KubeRay": by_kuberay}
