"""`python -m tandem.cluster.cli.kernels.build_one ORDER PARENT`: compiles one thing, in a process of its own, whose
memory goes with it.

ORDER is JSON, as cluster/cli/kernels/plan.py writes it. PARENT is the pid of the process that started this one. When
the parent ends, this process and its compilers do, too. If the build fails, stderr gets what the compiler said, and the
exit code is 1.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tandem.cache.kernels.build.build_once import cache_folder, reason_of
from tandem.cluster.cli.kernels.parent_watch import end_with


def build(order: dict[str, dict[str, object]]) -> None:
    """Raises what the builder raises."""
    if "library" in order:
        from tandem.cache.kernels.build.native_build import build_library

        build_library(Path(str(order["library"])), cache_folder())
    elif "cubin" in order:
        from tandem.workers.kernels.cuda.cubin_build import Cubin, build_cubin

        asked = order["cubin"]
        defines = asked["defines"]
        assert isinstance(defines, list)
        build_cubin(Cubin(Path(str(asked["source"])), tuple(defines), str(asked["arch"])), cache_folder())
    elif "device_puts" in order:
        from tandem.transfer.nvshmem.kernels.device_build import build_device_puts

        major, minor = order["device_puts"]
        build_device_puts(cache_folder(), (int(major), int(minor)))
    else:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = str(order["arch"])
        from tandem.cache.kernels.flashinfer.modules import FlashInferModule
        from tandem.cache.kernels.flashinfer.wrappers import build_module

        build_module(FlashInferModule(**order["module"]), Path(str(order["folder"])))  # pyright: ignore[reportArgumentType]


def main() -> int:
    end_with(int(sys.argv[2]))
    try:
        build(json.loads(sys.argv[1]))
    except (OSError, subprocess.SubprocessError, RuntimeError, ImportError) as error:
        print(reason_of(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
