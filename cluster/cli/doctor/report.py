"""What `tandem doctor` concludes from its findings, as lines and as JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem import __version__
from tandem.cache.kernels.build.nvml import Driver, Gpu
from tandem.cluster.cli.doctor.checks import NEEDED, NEEDED_BY_GPUS, Finding, Verdict
from tandem.cluster.cli.gpu_room import command_of
from tandem.cluster.cli.preflight import check_host, check_ray
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import ConfigError, StartFailed

CONFIG = "config"
REFUSED = "`tandem up` refuses it"


@dataclass(frozen=True)
class Needs:
    """The checks that must be ok. any_gpu: whether one of this host's GPUs must be able to serve, too."""

    names: tuple[str, ...]
    any_gpu: bool = False

    @classmethod
    def of_host(cls, driver: Driver) -> "Needs":
        """Returns the needs of whatever could run here: on GPUs if the host has some."""
        return cls((*NEEDED, *NEEDED_BY_GPUS), any_gpu=True) if driver.gpus else cls(NEEDED)

    @classmethod
    def of_config(cls, config: ClusterConfig, address: str | None) -> "Needs":
        """address: as check_config()'s. Other hosts may then have the GPUs."""
        island, here = config.island, address is None
        on_gpus = here and island.device == "cuda"
        nixl = ("nixl",) if here and island.transport == "nixl" else ()
        return cls((*NEEDED, *(NEEDED_BY_GPUS if on_gpus else ()), *nixl, CONFIG), any_gpu=on_gpus)

    def state(self, finding: Finding) -> str:
        """ok, missing (something can run without it) or failed."""
        if finding.ok:
            return "ok"
        return "failed" if finding.name in self.names else "missing"

    def failed(self, findings: Iterable[Finding], verdicts: Sequence[Verdict]) -> list[str]:
        """Returns the names of the checks that failed, each once."""
        names = [one.name for one in findings if self.state(one) == "failed"]
        if self.any_gpu and not any(one.serves for one in verdicts if one.device != "CPU"):
            names.append("gpus")
        return list(dict.fromkeys(names))


def check_config(config: ClusterConfig, address: str | None) -> list[Finding]:
    """Runs the checks of `tandem up` on this host. As there, an error hides the errors of later checks. Warnings are
    findings that are ok. address: of a Ray that the cluster would join."""
    try:
        check_ray(address)
        warnings = check_host(config, own_ray=address is None)
    except (ConfigError, StartFailed) as error:
        return [Finding(CONFIG, line, REFUSED) for line in str(error).splitlines()]
    return [Finding(CONFIG, line) for line in warnings] or [Finding(CONFIG, "nothing is in its way")]


def as_line(finding: Finding, needs: Needs) -> str:
    """Returns a line: state, name, finding, advice."""
    line = f"{needs.state(finding):8} {finding.name:18} {finding.found}"
    return f"{line} → {finding.advice}" if finding.advice else line


def as_json(findings: Sequence[Finding], verdicts: Sequence[Verdict], needs: Needs, driver: Driver) -> str:
    """Returns one object: the findings, what each device can run, and which processes hold each GPU's memory."""
    failed = needs.failed(findings, verdicts)
    return json.dumps(
        {
            "version": __version__,
            "ok": not failed,
            "failed": failed,
            "checks": [
                {"name": one.name, "state": needs.state(one), "found": one.found, "advice": one.advice}
                for one in findings
            ],
            "devices": [{"device": one.device, "serves": one.serves, "said": one.said} for one in verdicts],
            "gpus": [_gpu(number, gpu) for number, gpu in enumerate(driver.gpus)],
        },
        indent=2,
    )


def _gpu(number: int, gpu: Gpu) -> dict[str, Any]:
    """holders: those that this process can see, so their bytes may add up to less than used_bytes."""
    return {
        "number": number,
        "name": gpu.name,
        "uuid": gpu.uuid,
        "memory_bytes": gpu.memory,
        "used_bytes": gpu.used,
        "holders": [{"pid": pid, "command": command_of(pid), "bytes": size} for pid, size in gpu.holders],
    }
