"""`python -m tandem.cluster.cli.kernels.build_here PARENT`: builds what a start lacks on this host, as build_beside()
does on the launcher's.

stdin has the sections of a configuration that kernels depend on, as JSON. stdout gets a JSON list: what is lacking or
failed, each with the reason. PARENT is the pid of the process that started this one. When the parent ends, this process
and its compilers do, too.
"""

import json
import sys
from functools import partial

from tandem.cache.kernels.build.build_once import share_triton_cache
from tandem.cluster.cli.kernels.builds import STALL_SECONDS, plan_for
from tandem.cluster.cli.kernels.once_a_host import NICENESS, build, build_once_a_host
from tandem.cluster.cli.kernels.parent_watch import end_with
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import UsageError


def build_here(order: str) -> list[str]:
    """Builds here. Returns what is lacking or failed."""
    config = ClusterConfig.model_validate(json.loads(order))
    share_triton_cache()
    try:
        return build_once_a_host(partial(plan_for, config), _say, lambda: None, partial(build, NICENESS, STALL_SECONDS))
    except UsageError:  # GPUs of several kinds: they build at the first use
        return []


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    end_with(int(sys.argv[1]))
    print(json.dumps(build_here(sys.stdin.read())))


if __name__ == "__main__":
    main()
