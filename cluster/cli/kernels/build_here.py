"""`python -m tandem.cluster.cli.kernels.build_here`: builds what a start lacks on this host, as build_beside() does on
the launcher's.

stdin has the sections of a configuration that kernels depend on, as JSON. stdout gets a JSON list: what is lacking or
failed, each with the reason. It ends, and its compilers with it, when the process that started it does.
"""

import json
import os
import sys
from concurrent.futures import CancelledError
from functools import partial

from tandem.cache.kernels.build.build_once import share_triton_cache
from tandem.cluster.cli.kernels.builds import plan_for
from tandem.cluster.cli.kernels.once_a_host import NICENESS, build, build_once_a_host
from tandem.cluster.config.cluster_config import ClusterConfig
from tandem.cluster.errors import UsageError


def build_here(order: str, parent: int) -> list[str]:
    """Builds here. Returns what is lacking or failed. Raises CancelledError once `parent` is no more the parent."""
    config = ClusterConfig.model_validate(json.loads(order))

    def check() -> None:
        if os.getppid() != parent:
            raise CancelledError

    share_triton_cache()
    try:
        return build_once_a_host(partial(plan_for, config), _say, check, partial(build, NICENESS))
    except UsageError:  # GPUs of several kinds: they build at the first use
        return []


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parent = os.getppid()
    print(json.dumps(build_here(sys.stdin.read(), parent)))


if __name__ == "__main__":
    main()
