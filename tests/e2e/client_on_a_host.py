"""A client for other hosts: argv has address, CA, and a file of [prompts, parameters]; prints each prompt's tokens."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tandem.cluster.client import Client
from tandem.cluster.credentials import ClientSecurity

AT_ONCE = 8


def main(address: str, ca: str, path: str) -> None:
    prompts, parameters = json.loads(Path(path).read_text())
    with Client(address, ClientSecurity(os.environ["TOKEN"], ca)) as client, ThreadPoolExecutor(AT_ONCE) as pool:

        def ask(prompt: list[int]) -> list[int]:
            updates: Any = client.generate(prompt, timeout=60, **parameters)
            return [token for update in updates for token in update.token_ids]

        print(json.dumps(list(pool.map(ask, prompts))))


if __name__ == "__main__":
    main(*sys.argv[1:])
