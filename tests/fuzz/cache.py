"""Random programs on paged caches until as many steps are done as were asked for; prints what replays a failure.

python -m tests.fuzz.cache --steps 1000000        programs from a seed drawn now
python -m tests.fuzz.cache --seed 17 --setting "two groups" --steps 350
"""

import argparse
import sys
import time
from collections import Counter
from random import SystemRandom

from tests.cache.oracle import Oracle
from tests.cache.program import QUERY_HEADS, Program
from tests.cache.settings import SETTINGS

STEPS_EACH = 350  # of one program, as many as tests run
SEEDS = 2**32


def run(seed: int, steps: int, names: list[str]) -> Counter[str]:
    """Runs programs of seed, seed + 1, … on each setting in turn, `steps` in all. Counts what came about."""
    counts, done, began = Counter[str](), 0, time.monotonic()
    oracles = {name: Oracle(SETTINGS[name], QUERY_HEADS) for name in names}
    while done < steps:
        for name in names:
            length = min(STEPS_EACH, steps - done)
            program = Program(seed, SETTINGS[name], oracles[name])
            try:
                program.run(length)
            except BaseException:
                command = f'python -m tests.fuzz.cache --seed {seed} --setting "{name}" --steps {length}'
                print(f"after {done} steps, failed: {command}", file=sys.stderr, flush=True)
                raise
            counts.update(program.counts)
            done += length
        seed += 1
        print(f"{done} steps, {time.monotonic() - began:.0f} s, next seed {seed}", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="Random programs on paged caches, compared with naive ones.")
    parser.add_argument("--seed", type=int, default=SystemRandom().randrange(SEEDS), help="the first; default: drawn")
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--setting", choices=SETTINGS, help="default: all in turn")
    arguments = parser.parse_args()
    names = list(SETTINGS) if arguments.setting is None else [arguments.setting]
    print(f"seed {arguments.seed}, {arguments.steps} steps", flush=True)
    counts = run(arguments.seed, arguments.steps, names)
    for what, count in sorted(counts.items()):
        print(f"{count:9} {what}")


if __name__ == "__main__":
    main()
