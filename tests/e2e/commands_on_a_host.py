"""Runs commands of `tandem` one after another in one process, for its imports take most of a second.

A line on stdin has a command's arguments as JSON. A line on stdout has the exit code and what it wrote on stdout and
stderr.
"""

import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from tandem.cluster.cli.commands import main


def run(arguments: list[str]) -> tuple[int, str, str]:
    code: object = 0
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code
    return code if isinstance(code, int) else 0 if code is None else 1, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line))), flush=True)
