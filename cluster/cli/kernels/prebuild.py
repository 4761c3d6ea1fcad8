"""`tandem build-kernels`: compiles ahead of a start, into a folder that like hosts can use."""

import math
import os
import sys
import time
from functools import partial
from pathlib import Path

from tandem.cache.kernels.build.build_once import KERNEL_CACHE, cache_folder
from tandem.cluster.cli.preflight import check_model
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import BuildFailed

GIB = 1 << 30


def prebuild(config: ClusterConfig, output: Path | None, gpu: str | None, *, dry_run: bool) -> None:
    """Prints a line for each build, and the folder that they are in. Raises BuildFailed if one fails or cannot be
    tried."""
    check_model(config)
    if output is not None:
        os.environ[KERNEL_CACHE] = str(output.expanduser().resolve())
    began = time.monotonic()

    from tandem.cluster.cli.kernels.builds import plan_for
    from tandem.cluster.cli.kernels.once_a_host import build, build_once_a_host

    plan = plan_for(config, gpu)
    for title in plan.there:
        print(f"there    {title}")
    if dry_run:
        for build in plan.missing:
            print(f"missing  {build.title}: {build.units} compilers of {build.compiler_bytes / GIB:.1f} GiB at most")
        for reason in plan.lacking:
            print(f"lacking  {reason}")
        return
    lacking = build_once_a_host(partial(plan_for, config, gpu), _say, lambda: None, partial(build, 0, math.inf))
    built = len(plan.missing) - len(lacking) + len(plan.lacking)
    print(f"{built} built, {len(plan.there)} there, in {time.monotonic() - began:.0f} s: {cache_folder()}")
    if lacking:
        raise BuildFailed("\n".join(f"not built: {reason}" for reason in lacking))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
