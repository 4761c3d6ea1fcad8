"""`make chaos`: a long storm. Prints JSON: what was done to the cluster, and what its clients saw.

python -m tests.chaos [--blows N] [--requests N] [--seed N] [--clients N] [--gpus] [--attacker]
    [--roles split|adaptive|colocated] [--arch NAME] [--speculate ngram|draft_model|mtp|eagle3] [--ranks]
    [--transport shared_memory|tcp|nixl], also of the storms below
python -m tests.chaos --ray [--blows N] [--seed N] [--clients N] [--every SECONDS] [--survived]: over `tandem up`
    its Ray and its launcher are killed, too, unless --survived asks for what a cluster survives
python -m tests.chaos --hosts [--blows N] [--seed N] [--ranks]: over three hosts, which are network namespaces; links go
    down, too
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    # Each process of the cluster imports this module when it starts: it should not have to import the oracle, too.
    from torch import cuda

    from tandem.cluster.tools.architectures import ARCHITECTURES
    from tandem.transfer.factory import TRANSPORTS
    from tests.chaos.storm import RANKS, ROLES
    from tests.chaos.targets import DRAFTED, make_target

    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("blows", 1000), ("requests", 1000), ("seed", 0), ("clients", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gpus", action="store_true", help="of this host, over NVSHMEM, shared by all islands")
    parser.add_argument("--attacker", action="store_true", help="attacks the gateway's ports meanwhile")
    parser.add_argument("--roles", choices=[*ROLES], default="adaptive", help="with colocated, islands of one worker")
    parser.add_argument("--arch", choices=[*ARCHITECTURES], default="llama", help="of the random model")
    parser.add_argument("--speculate", choices=[*DRAFTED], help="over a model that its drafts suit; see make_target")
    parser.add_argument("--ranks", action="store_true", help="one island, whose workers have two processes each")
    parser.add_argument("--transport", choices=[name for name, one in TRANSPORTS.items() if "cpu" in one.devices])
    parser.add_argument("--ray", action="store_true", help="over `tandem up`, with a real Ray")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between blows, of --ray")
    parser.add_argument("--survived", action="store_true", help="only blows that a cluster survives, of --ray")
    parser.add_argument("--hosts", action="store_true", help="over three hosts of this machine; needs root")
    options = parser.parse_args()
    if options.gpus and not cuda.is_available():
        parser.error("--gpus needs a CUDA device; tandem doctor says what is missing")
    if options.gpus and options.transport:
        parser.error("--gpus is over NVSHMEM; give it without --transport")
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as folder:
        model, settings = make_target(Path(folder), options.arch, options.speculate)
        settings |= RANKS if options.ranks else {}
        settings |= {"island.transport": options.transport} if options.transport else {}
        outcome = _storm(options, model, settings, Path(folder))
    print(json.dumps({"seed": options.seed, **vars(outcome)}, indent=1))


def _storm(options: argparse.Namespace, model: Path, settings: dict[str, Any], folder: Path) -> object:
    """Runs the storm that the options name, and returns its outcome."""
    from tests.chaos.host_storm import HostStorm, plan_host_blows
    from tests.chaos.ray_storm import SURVIVED, TARGETS, RayStorm, plan_ray_blows
    from tests.chaos.storm import RANKS, Storm

    if options.hosts:
        ranks = RANKS if options.ranks else {}
        of_hosts = HostStorm(model, options.seed, folder, options.transport, ranks)
        return of_hosts.run(plan_host_blows(options.seed, options.blows))
    if options.ray:
        blows = plan_ray_blows(options.seed, options.blows, SURVIVED if options.survived else TARGETS)
        storm = RayStorm(model, options.seed, options.clients, options.every, options.transport)
        return storm.run(blows)
    storm = Storm(
        model,
        folder / "faults",
        options.seed,
        options.clients,
        gpus=options.gpus,
        roles=options.roles,
        attacked=options.attacker,
        settings=settings,
    )
    return storm.run(options.blows, options.requests)


if __name__ == "__main__":
    main()
