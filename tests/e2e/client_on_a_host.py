"""A client for other hosts: argv has address, CA, and a file of [prompts, parameters, cancelled].

Prints each prompt's tokens. It goes away from those whose numbers are in `cancelled` after their first message.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from tandem.cluster.client import Client
from tandem.cluster.credentials import ClientSecurity

AT_ONCE = 8


def main(address: str, ca: str, path: str) -> None:
    prompts, parameters, cancelled = json.loads(Path(path).read_text())
    with Client(address, ClientSecurity(os.environ["TOKEN"], ca)) as client, ThreadPoolExecutor(AT_ONCE) as pool:

        def ask(number: int) -> list[int]:
            updates: Any = client.generate(prompts[number], timeout=60, **parameters)
            with closing(updates):
                if number in cancelled:
                    return next(updates).token_ids
                return [token for update in updates for token in update.token_ids]

        print(json.dumps(list(pool.map(ask, range(len(prompts))))))


if __name__ == "__main__":
    main(*sys.argv[1:])
