"""`make explore`: every small world, until all that can be reached is known or --worlds are. Prints JSON.

python -m tests.protocol [--worlds N]
"""

import argparse
import gc
import json
import time
from functools import partial

from tests.protocol.explorer import explore
from tests.protocol.rank_world import explore_ranks
from tests.protocol.worlds import WORLDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=50_000, help="most worlds of each kind")
    most_worlds = parser.parse_args().worlds
    gc.freeze()  # worlds come and go by the thousand: what was there before need not be looked through each time
    explorations = {name: partial(explore, limits, shape) for name, (limits, shape) in WORLDS.items()}
    for name, explored_up_to in {**explorations, "ranks": partial(explore_ranks, 2)}.items():
        began = time.monotonic()
        explored = explored_up_to(most_worlds)
        seconds = round(time.monotonic() - began, 1)
        found = {"world": name, "worlds": explored.worlds, "complete": explored.complete, "seconds": seconds}
        print(json.dumps(found), flush=True)
        if explored.finding is not None:
            raise SystemExit(str(explored.finding))


if __name__ == "__main__":
    main()
