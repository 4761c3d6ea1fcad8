"""`tandem build-kernels`: compiles ahead of a start, into a folder that like hosts can use."""

import os
import sys
import time
from pathlib import Path

from tandem.cache.kernels.build.build_once import KERNEL_CACHE, cache_folder
from tandem.cluster.cli.preflight import check_model
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import BuildFailed

GIB = 1 << 30


def prebuild(config: ClusterConfig, output: Path | None, gpu: str | None, *, dry_run: bool) -> None:
    """Prints a line for each build, and where they lie. BuildFailed when one fails or cannot be tried."""
    check_model(config)
    if output is not None:
        os.environ[KERNEL_CACHE] = str(output.expanduser().resolve())
    began = time.monotonic()

    from tandem.cluster.cli.kernels.builds import build_missing, plan_for

    plan = plan_for(config, gpu)
    for title in plan.there:
        print(f"there    {title}")
    if dry_run:
        for build in plan.missing:
            print(f"missing  {build.title}: {build.units} compilers of {build.compiler_bytes / GIB:.1f} GiB at most")
        for reason in plan.lacking:
            print(f"lacking  {reason}")
        return
    lacking = build_missing(plan, lambda line: print(line, file=sys.stderr, flush=True))
    built = len(plan.missing) - len(lacking) + len(plan.lacking)
    print(f"{built} built, {len(plan.there)} there, in {time.monotonic() - began:.0f} s: {cache_folder()}")
    if lacking:
        raise BuildFailed("\n".join(f"not built: {reason}" for reason in lacking))
