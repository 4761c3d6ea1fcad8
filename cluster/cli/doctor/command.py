"""`tandem doctor`: what this host has for tandem, and what it lacks."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cluster.cli.options import AsJson

if TYPE_CHECKING:
    from tandem.cache.kernels.build.nvml import Driver
    from tandem.cluster.cli.doctor.checks import Finding
    from tandem.cluster.config.cluster_config import ClusterConfig


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="Reads a cluster's YAML, and checks what `tandem up` would check of it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Sets model.path, as `tandem up` does.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Sets a key, as `tandem up` does. Repeatable."),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Lets hosts of the Ray at HOST:PORT have the workers, as `tandem up` does.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has for tandem, and what it lacks.

    It exits with 1 when a check has failed: with a YAML, one that this cluster needs; else one without which nothing
    runs here, or without which the GPUs of this host serve nothing. What is missing otherwise is advice.
    """
    from tandem.cache.kernels.build.nvml import read_driver
    from tandem.cluster.cli.doctor import report
    from tandem.cluster.cli.doctor.checks import verdicts
    from tandem.cluster.config.cluster_config import load_config
    from tandem.cluster.config.file import parse_override
    from tandem.cluster.errors import UsageError

    values = dict(map(parse_override, overrides or ())) | ({} if model is None else {"model.path": model})
    if config is None and (values or address):
        raise UsageError("--model, --set or --address is given without a YAML; give one, such as deploy/local.yaml")
    loaded = None if config is None else load_config(config, values, os.environ)
    driver = read_driver()
    needs = report.Needs.of_host(driver) if loaded is None else report.Needs.of_config(loaded, address)
    findings: list[Finding] = []
    for finding in _all(loaded, address, driver):
        findings.append(finding)
        if not as_json:
            print(report.as_line(finding, needs), flush=True)
    devices = list(verdicts(findings, driver))
    if as_json:
        print(report.as_json(findings, devices, needs, driver))
    else:
        print(*(one.line for one in devices), sep="\n")
    failed = needs.failed(findings, devices)
    if failed:
        print(f"tandem: failed: {', '.join(failed)}", file=sys.stderr)
        raise typer.Exit(1)


def _all(config: "ClusterConfig | None", address: str | None, driver: "Driver") -> "Iterator[Finding]":
    """Yields the findings about the host, then about the configuration."""
    from tandem.cluster.cli.doctor.checks import examine
    from tandem.cluster.cli.doctor.report import check_config
    from tandem.cluster.config.sections import GatewaySection

    yield from examine((GatewaySection() if config is None else config.gateway).port, driver)
    if config is not None:
        yield from check_config(config, address)
