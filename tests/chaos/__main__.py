"""`make chaos`: a long storm. Prints JSON: what was done to the cluster, and what its clients saw.

python -m tests.chaos [--blows N] [--requests N] [--seed N] [--clients N] [--gpus] [--attacker]
    [--roles split|adaptive|colocated] [--arch NAME] [--speculate ngram|draft_model|mtp|eagle3]
python -m tests.chaos --ray [--blows N] [--seed N]: over `tandem up`; its Ray and its launcher are killed, too
python -m tests.chaos --hosts [--blows N] [--seed N]: over three hosts, which are network namespaces; links go down, too
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path


def main() -> None:
    # Each process of the cluster imports this module when it starts: it should not have to import the oracle, too.
    from torch import cuda

    from tandem.cluster.cli.random_checkpoint import ARCHITECTURES
    from tests.chaos.host_storm import HostStorm, plan_host_blows
    from tests.chaos.ray_storm import RayStorm, plan_ray_blows
    from tests.chaos.storm import ROLES, Storm
    from tests.chaos.targets import DRAFTED, make_target

    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("blows", 1000), ("requests", 1000), ("seed", 0), ("clients", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gpus", action="store_true", help="of this host, over NVSHMEM, shared by all islands")
    parser.add_argument("--attacker", action="store_true", help="attacks the gateway's ports meanwhile")
    parser.add_argument("--roles", choices=[*ROLES], default="adaptive", help="with colocated, islands of one worker")
    parser.add_argument("--arch", choices=[*ARCHITECTURES], default="llama", help="of the random model")
    parser.add_argument("--speculate", choices=[*DRAFTED], help="with a model that its drafts suit, not that of --arch")
    parser.add_argument("--ray", action="store_true", help="over `tandem up`, with a real Ray")
    parser.add_argument("--hosts", action="store_true", help="over three hosts of this machine; needs root")
    options = parser.parse_args()
    if options.gpus and not cuda.is_available():
        parser.error("--gpus needs a CUDA device; tandem doctor says what is missing")
    logging.basicConfig(level=logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as folder:
        model, settings = make_target(Path(folder), options.arch, options.speculate)
        if options.hosts:
            blows = plan_host_blows(options.seed, options.blows)
            outcome: object = HostStorm(model, options.seed, Path(folder)).run(blows)
            print(json.dumps({"seed": options.seed, **vars(outcome)}, indent=1))
            return
        if options.ray:
            outcome = RayStorm(model, options.seed).run(plan_ray_blows(options.seed, options.blows))
            print(json.dumps({"seed": options.seed, **vars(outcome)}, indent=1))
            return
        faults = Path(folder) / "faults"
        storm = Storm(
            model,
            faults,
            options.seed,
            options.clients,
            gpus=options.gpus,
            roles=options.roles,
            attacked=options.attacker,
            settings=settings,
        )
        outcome = storm.run(options.blows, options.requests)
    print(json.dumps({"seed": options.seed, **vars(outcome)}, indent=1))


if __name__ == "__main__":
    main()
